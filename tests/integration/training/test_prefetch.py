"""Values that arrive while the forward has begun: the same bits, and nobody sees one that has not come."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardyard.domain import errors
from shardyard.transport.in_process import InProcessStream
from shardyard.wire.frames import Frame
from shardyard_ps_server.service import exchange_stream
from shardyard_worker.exchange.buffers.partial_reply import PartialReply
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.job.job import Job
from tests.integration.training.test_maps import train as train_model
from tests.integration.training.test_maps import yard_of
from tests.support.alone import SYNC_2, Connect, Counted

STEPS = 5
WAIT_S = 10
ALWAYS = {"worker.exchange": "overlapped", "worker.same_host": "never"}


class Gate:
    """Lets the first frame of each answer through, and the others when it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.late: list[PartialReply] = []
        self.slow: int | None = None
        self.in_vain = False
        self._changed = threading.Condition()

    def shut(self, job: Job) -> None:
        """For answers from now on."""
        job._loop.trainer.values.complete()
        flight = getattr(job._loop.strategy, "_flight", None)
        if flight is not None:
            flight.answer.result(WAIT_S)
        for line in job._loop.trainer.router._streams.values():
            line.await_answer()
        self.opened.clear()
        self.late.clear()

    def held(self) -> PartialReply:
        """What waits at the gate, once something does."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.late, WAIT_S)
            return self.late[-1]

    def pass_through(self, arrival: PartialReply, server: int) -> None:
        if self.slow not in (None, server):
            return
        with self._changed:
            self.late.append(arrival)
            self._changed.notify_all()
        self.in_vain = self.in_vain or not self.opened.wait(WAIT_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every run of bytes is a frame of its own, and comes after a moment."""
    found = Gate()
    receive = ServerStream._receive

    def held(self: ServerStream, stream: object, arrival: PartialReply, deadline_ms: int) -> None:
        found.pass_through(arrival, self.server)
        receive(self, stream, arrival, deadline_ms)  # type: ignore[arg-type]

    add = PartialReply.add

    def slowly(self: PartialReply, frame: Frame) -> None:
        threading.Event().wait(0.0005)
        add(self, frame)

    monkeypatch.setattr(exchange_stream, "FRAME_BYTES", 0)
    monkeypatch.setattr(ServerStream, "_receive", held)
    monkeypatch.setattr(PartialReply, "add", slowly)
    yield found
    found.opened.set()
    assert not found.in_vain, "nobody went on without these values"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32)
        self.first = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class Tied(nn.Module):
    """One parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8, bias=False)
        self.body = nn.Linear(8, 8)
        self.inside = nn.Linear(8, 8)
        self.out.weight = self.inside.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.body(self.inside(x))))


class Foreign(nn.Module):
    """Parameters of modules that are never called, or called later."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(8, 8)
        self.later = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.body(x), self.never.weight) * self.own
        return self.later(F.linear(x, self.later.weight))


class Recurrent(nn.Module):
    """Parameters that torch hands on in lists, and of modules whose forward it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(8, 8, num_layers=2)
        self.look = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.read(x)
        x, _ = self.look(x, x, x)
        return x


class Branching(nn.Module):
    """What is used, and by whom, changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for turn in range(2):
            x = self.parts[(self.step + turn) % 4](x)
        return F.linear(x, self.parts[(self.step + 2) % 4].weight)


class Scripted(nn.Module):
    """A module whose inside torch does not tell about."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.body = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.jit.optimized_execution(False):  # else its first run in a process differs from the others
            return self.head(self.body(x))


MODELS: tuple[Callable[[], nn.Module], ...] = (Plain, Tied, Foreign, Recurrent, Branching, Scripted)


def train(connect: Connect, make: Callable[[], nn.Module], **settings: object) -> tuple[str, list[float]]:
    job = connect(**settings)
    torch.manual_seed(3)
    model = make()
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    found = digest(job)
    job.close()
    return found, losses


def digest(job: Job) -> str:
    values = job.pull()
    return hashlib.sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values))).hexdigest()


@pytest.mark.parametrize(
    "settings",
    [
        {"job.consistency.mode": "sync"},
        {"job.consistency.mode": "async"},
        {"job.block_bytes": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", MODELS)
def test_promise_6_bits_are_the_same_while_values_arrive(
    connect: Connect, gate: Gate, make: Callable[[], nn.Module], settings: dict[str, object]
) -> None:
    assert train(connect, make, **ALWAYS, **settings) == train(connect, make, **settings)
    assert gate.late, "nothing arrived after a step"


class Chain(nn.Module):
    """Its parameters are registered in another order than they are used in."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        for name in "dbca":
            setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in "abcd":
            x = getattr(self, name)(x)
        return x


def begin(connect: Connect, model: nn.Module, **settings: object) -> tuple[Job, torch.optim.Optimizer]:
    """A model that has taken its first step."""
    job = connect(**ALWAYS | settings)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    return job, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(16, 8)).square().mean().backward()
    optimizer.step()


def test_forward_begins_before_the_last_values_have_come(connect: Connect, gate: Gate) -> None:
    model = Chain()
    job, optimizer = begin(connect, model, **{"yard.servers": 1})
    events: list[str] = []
    for name in "abcd":
        module = model.get_submodule(name)
        module.register_forward_hook(partial(note, events, name))
    for _ in range(2):
        gate.shut(job)
        step(model, optimizer)
        late = gate.held()
        assert not late.complete
        events.clear()
        opens = model.a.register_forward_hook(partial(open_after, gate, events))
        model(torch.ones(16, 8))
        opens.remove()
        assert events == ["a", "gate opens", "b", "c", "d"]
        assert late.complete


def note(events: list[str], name: str, *_: object) -> None:
    events.append(name)


def open_after(gate: Gate, events: list[str], *_: object) -> None:
    events.append("gate opens")
    gate.opened.set()


def test_order_is_that_of_the_last_forward_before_the_first_gradient(connect: Connect, gate: Gate) -> None:
    model = Plain()
    job = connect(**ALWAYS)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.state_dict()
    model.eval()
    model(torch.ones(16, 8))
    model.train()
    step(model, optimizer)
    names = [variable.spec.name for variable in job._loop.trainer.variables]
    assert [names[index] for index in job._loop.trainer.router._requests._order()] == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "last.weight",
        "last.bias",
    ]


def test_slow_server_holds_up_its_own_values_alone(connect: Connect, gate: Gate) -> None:
    model = Chain()
    job, optimizer = begin(connect, model)
    buffers = job._loop.trainer.link.buffers
    spans = [buffers.span(index) for index in range(4)]
    servers = [span.server for span in spans if span is not None]
    slow = servers[0]
    assert sorted(servers.count(server) for server in buffers.servers) == [2, 2]
    gate.slow = slow
    gate.shut(job)
    step(model, optimizer)
    for index, server in enumerate(servers):
        if server != slow:
            assert job._loop.trainer.variables[index].target.sum().isfinite()
    assert not gate.held().complete
    gate.opened.set()
    assert model(torch.ones(16, 8)).sum().isfinite()
    assert gate.held().complete


def read_back(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READERS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model).state_dict(),
    "save": read_back,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).state_dict(),
    "data": lambda model: {name: value.data.clone() for name, value in model.named_parameters()},
    "numpy": lambda model: {
        n: torch.from_numpy(value.detach().numpy().copy()) for n, value in model.named_parameters()
    },
    "list": lambda model: {"all": torch.nn.utils.parameters_to_vector(model.parameters())},
    "evaluation": lambda model: {"out": model.eval()(torch.ones(16, 8))},
    "no_grad": lambda model: {"norm": torch.stack(torch._foreach_norm(list(model.parameters())))},
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_after_a_step_reads_the_whole_version(connect: Connect, gate: Gate, reader: str) -> None:
    found = []
    for settings in (ALWAYS, {}):
        torch.manual_seed(3)
        model = Chain()
        begin(connect, model, **settings | {"worker.exchange": settings.get("worker.exchange", "blocking")})
        values = READERS[reader](model)
        assert {type(value) for value in values.values()} == {torch.Tensor}
        found.append({name: value.detach() for name, value in values.items()})
    assert gate.late
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_what_a_script_writes_after_a_step_is_not_written_over(connect: Connect, gate: Gate) -> None:
    model = Chain()
    begin(connect, model)
    with torch.no_grad():
        model.d.weight.fill_(7)
    model(torch.ones(16, 8))
    assert model.d.weight.eq(7).all()


def test_asking_for_no_value_waits_for_none(connect: Connect, gate: Gate) -> None:
    model = Chain()
    job, optimizer = begin(connect, model, **{"yard.servers": 1})
    gate.shut(job)
    step(model, optimizer)
    optimizer.zero_grad()
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.shape == (8, 8)
        assert parameter.grad is None
        assert parameter.requires_grad
    assert not gate.held().complete


def test_job_that_is_left_leaves_whole_values_and_plain_tensors(connect: Connect, gate: Gate) -> None:
    torch.manual_seed(3)
    model = Chain()
    job, _ = begin(connect, model)
    expected = job.pull()
    job.close()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda frame: frame._replace(offset=1 << 40), "of 1024 bytes"),
        (lambda frame: frame._replace(data=bytes(1 << 20)), "of 1024 bytes"),
        (lambda frame: frame._replace(offset=0, data=bytes(64)), "some of them have come before"),
        (lambda frame: frame._replace(data=b""), "without data"),
    ],
    ids=["beyond the end", "too much", "twice", "nothing"],
)
def test_malformed_answers_are_refused_where_their_values_are_used(
    connect: Connect,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Frame], Frame],
    complaint: str,
) -> None:
    model = Chain()
    job, optimizer = begin(connect, model, **{"yard.servers": 1})
    model(torch.ones(16, 8))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    receive = InProcessStream.receive

    def spoiled(self: InProcessStream, *, timeout_ms: int) -> object:
        frame = receive(self, timeout_ms=timeout_ms)
        return spoil(frame) if isinstance(frame, Frame) and not frame.header else frame

    monkeypatch.setattr(InProcessStream, "receive", spoiled)
    step(model, optimizer)
    with pytest.raises(errors.MalformedPayload, match=complaint):
        model(torch.ones(16, 8))
    with pytest.raises(errors.MalformedPayload, match=complaint):
        job.close()
    unchanged = [torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)]
    assert unchanged.count(False) == 1, "the one that came with the head"


def test_a_step_waits_for_values_that_are_coded(connect: Connect, gate: Gate) -> None:
    coded = {"job.compression.pull": "bf16"}
    assert train(connect, Chain, **ALWAYS, **coded) == train(connect, Chain, **coded)
    assert not gate.late


@pytest.mark.parametrize("saved_after", [0, 6])
def test_promise_2_each_sample_counts_once_though_a_server_dies_while_its_values_arrive(
    tmp_path: Path, alone: None, gate: Gate, saved_after: int
) -> None:
    """A partition that is restored as it was before the lease has to hear of it again."""
    settings = ALWAYS | {"job.data.batches_per_data_shard": 1_000}
    with yard_of(tmp_path, settings) as (yard, job):
        counted = Counted(job, 96)
        if saved_after == 0:
            yard.save()
        for number, (index,) in enumerate(job.batches(counted.data, batch_size=4, epochs=1)):
            if number == 11:
                gate.shut(job)
            counted.step(index)
            if number + 1 == saved_after:
                yard.save()
            if number == 11:
                yard.lose()
                assert not gate.held().complete
                gate.opened.set()
        assert counted.counts == [1.0] * 96


def test_promise_6_job_that_goes_back_while_values_arrive_ends_at_the_same_bits(
    connect: Connect, tmp_path: Path, gate: Gate
) -> None:
    expected, batches = train_model(connect(settings=SYNC_2), lambda step: None)
    done: list[str] = []
    with yard_of(tmp_path, SYNC_2 | ALWAYS) as (yard, job):

        def disturb(step: int) -> None:
            if step == 5 and not done:
                yard.save(step=5)
                done.append("saved")
            if step == 8 and done == ["saved"]:
                gate.shut(job)
            if step == 9 and done == ["saved"]:
                assert not gate.held().complete
                yard.lose(whole=True)
                gate.opened.set()
                done.append("lost")

        found, more = train_model(job, disturb)
    assert done == ["saved", "lost"]
    assert more > batches
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_what_a_forward_has_used_stays_when_the_rest_is_asked_for_again(
    tmp_path: Path, alone: None, gate: Gate
) -> None:
    with yard_of(tmp_path, ALWAYS | {"job.block_bytes": 1 << 20}) as (yard, job):
        model = Chain()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step(model, optimizer)
        yard.save()
        gate.shut(job)
        step(model, optimizer)
        assert not gate.held().complete
        yard.lose()
        gate.opened.set()
        x = torch.ones(16, 8, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        assert job._loop.trainer.router._requests._order()
