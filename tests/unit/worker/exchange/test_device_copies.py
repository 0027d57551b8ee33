"""DeviceCopies beside the computation, with lanes that do nothing before somebody waits: what is read too early is not
there.

A real device may do its work at any time between, so tests also let a lane catch up where that is worse.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.shared_memory import SharedMemory, attach
from shardyard_coordinator.placement.placement import Server, assign, plan
from shardyard_worker.exchange.buffers import device_copies
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies, DeviceCopy, copies_for, engine_of, tensor_of
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.training.grad_hooks import GradHooks

torch.set_num_threads(1)

CPU = torch.device("cpu")
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SERVER = Incarnation(1)


class FakeLane:
    """Does what it is given when somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.done = 0
        self.follows = 0
        self.kept: list[int] = []
        self.led: list[FakeEvent] = []
        self.within = 0

    def follow(self) -> None:
        self.follows += 1

    def launch(self, work: Callable[[], None]) -> None:
        assert self.follows, "what is copied was not waited for"
        self.waiting.append(work)

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.within += 1
        yield

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor.data_ptr())

    def mark(self) -> FakeEvent:
        return FakeEvent(self, self.done + len(self.waiting))

    def lead(self, event: FakeEvent) -> None:
        self.led.append(event)

    def catch_up(self, until: int | None = None) -> None:
        while self.waiting and (until is None or self.done < until):
            self.waiting.popleft()()
            self.done += 1


class FakeEvent:
    def __init__(self, lane: FakeLane, until: int) -> None:
        self.lane = lane
        self.until = until
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        self.lane.catch_up(self.until)


class FakeEngine:
    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.lanes: list[FakeLane] = []
        self.pinned: dict[int, tuple[int, bool]] = {}
        self.refused = 0

    def lane(self) -> FakeLane:
        self.lanes.append(FakeLane())
        return self.lanes[-1]

    def pin(self, address: int, nbytes: int, *, read_only: bool) -> str:
        if self.refusal:
            self.refused += 1
            return self.refusal
        assert address not in self.pinned
        self.pinned[address] = nbytes, read_only
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @property
    def out(self) -> FakeLane:
        return self.lanes[0]

    @property
    def back(self) -> FakeLane:
        return self.lanes[1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(device_copies, "EARLY_BYTES_MIN", 0)
    return FakeEngine()


@pytest.fixture
def copies(engine: FakeEngine) -> DeviceCopies:
    made = copies_for([torch.zeros(1)], lambda where: engine)
    assert made is not None
    return made


SPECS = (
    VariableSpec("whole", DType.FLOAT32, (6, 4)),
    VariableSpec("cut", DType.FLOAT64, (40,)),
    VariableSpec("scalar", DType.FLOAT32, ()),
    VariableSpec("count", DType.INT64, (2,), VariableKind.BUFFER),
)


def layout_and_map() -> tuple[JobLayout, PartitionMap]:
    layout = plan(SPECS, SGD, partitions=3, block_bytes=128)
    sizes = [part.payload_bytes for part in layout.partitions]
    return layout, assign(sizes, [Server(SERVER, "host:1")], generation=Generation(1))


def made_buffers(copies: DeviceCopies, *, slots: int = 1, shareable: bool = False) -> FlatBuffers:
    buffers = FlatBuffers(*layout_and_map(), slots=slots, shareable=shareable, copies=copies)
    assert buffers.view(0) is not None
    assert buffers.view(1) is None
    return buffers


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(spec.shape, dtype=torch_dtype(spec))) for spec in SPECS[:3]]


def torch_dtype(spec: VariableSpec) -> torch.dtype:
    return {DType.FLOAT32: torch.float32, DType.FLOAT64: torch.float64, DType.INT64: torch.int64}[spec.dtype]


def sent_now(buffers: FlatBuffers, index: int) -> np.ndarray:
    """What a push would carry of a variable, read from its payload as it lies now."""
    return torch.cat([piece.reshape(-1) for piece in buffers._gradients[buffers.slot][index]]).numpy().copy()


class Model:
    """Parameters whose gradients are what a test says."""

    def __init__(self, buffers: FlatBuffers) -> None:
        self.buffers = buffers
        self.parameters = parameters()
        self.hooks = GradHooks(buffers, dict(enumerate(self.parameters)))
        self.count = torch.tensor([7, 8])

    def backward(self, value: float, only: int | None = None) -> None:
        chosen = self.parameters if only is None else [self.parameters[only]]
        torch.autograd.backward([(each * value).sum() for each in chosen])

    def fill(self) -> None:
        self.buffers.fill([*(each.grad for each in self.parameters), self.count])

    def assert_sent(self, *values: float) -> None:
        for index, value in enumerate(values):
            assert set(sent_now(self.buffers, index).tolist()) == {value}, index


# --- gradients


def test_gradient_stays_where_it_is_and_is_copied_beside(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    assert all(each.grad is not model.buffers.view(i) for i, each in enumerate(model.parameters))
    assert len(engine.out.waiting) == 3
    assert engine.out.follows == 3
    assert {each.grad.data_ptr() for each in model.parameters} <= set(engine.out.kept)
    model.assert_sent(0, 0, 0)


def test_payload_is_there_when_it_has_been_filled(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    model.fill()
    model.assert_sent(3, 3, 3)
    np.testing.assert_array_equal(sent_now(model.buffers, 3), [7, 8])
    assert not engine.out.waiting


def test_what_was_taken_is_not_copied_twice(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    engine.out.catch_up()
    for index in range(3):
        for piece in model.buffers._gradients[0][index]:
            piece.fill_(-1.0)
    model.fill()
    model.assert_sent(-1, -1, -1)
    model.fill()  # once: nobody watches what lies there after that
    model.assert_sent(3, 3, 3)


def test_what_tells_that_it_is_there_waits_for_one_gradient(engine: FakeEngine, copies: DeviceCopies) -> None:
    buffers = made_buffers(copies)
    first = buffers.take(0, torch.full((6, 4), 2.0))
    second = buffers.take(1, torch.full((40,), 4.0, dtype=torch.float64))
    assert first is not None
    assert second is not None
    first()
    assert sent_now(buffers, 0).tolist() == [2.0] * 24
    assert sent_now(buffers, 1).tolist() == [0.0] * 40
    second()
    assert sent_now(buffers, 1).tolist() == [4.0] * 40


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.grad.mul_(0.5),
    "by .data": lambda p: p.grad.data.mul_(0.5),
    "by .data, one element": lambda p: p.grad.data.view(-1)[:1].zero_(),
    "by numpy": lambda p: p.grad.numpy().__imul__(0.5),
    "clipped by norm": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "clipped by value": lambda p: torch.nn.utils.clip_grad_value_([p], 0.1),
    "unscaled": lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad], torch.zeros(1), torch.tensor(2.0**-16)
    ),
    "another": lambda p: setattr(p, "grad", torch.full_like(p, 5.0)),
    "other memory": lambda p: setattr(p.grad, "data", torch.full_like(p, 5.0)),
    "accumulated": lambda p: (p * 4.0).sum().backward(),
    "accumulated by hand": lambda p: p.grad.add_(1.0),
}


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradient_that_was_changed_after_backward_is_pushed_as_it_is(
    engine: FakeEngine, copies: DeviceCopies, change: str, when: str
) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    if when == "after the copy":
        engine.out.catch_up()
    for parameter in model.parameters:
        CHANGES[change](parameter)
    model.fill()
    for index, parameter in enumerate(model.parameters):
        assert parameter.grad is not None
        np.testing.assert_array_equal(sent_now(model.buffers, index), parameter.grad.numpy().ravel())


def test_gradient_that_changes_while_it_is_copied_is_copied_again(engine: FakeEngine, copies: DeviceCopies) -> None:
    """The sum of words is taken before the copy, so that it cannot hide that only a part of the copy is new."""
    buffers = made_buffers(copies)
    gradient = torch.full((6, 4), 3.0)
    buffers.take(0, gradient)

    def torn(pairs: device_copies.Pairs) -> None:
        ((into, values),) = pairs
        into[:10].copy_(values[:10])
        gradient.data.mul_(0.5)
        into[10:].copy_(values[10:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "_copy_beside", torn)
        engine.out.catch_up()
    buffers.fill([gradient, None, None, None])
    assert sent_now(buffers, 0).tolist() == [1.5] * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.5, 2.0, 2.0**-16, 0.999, 0.0])
def test_sum_of_words_tells_what_was_scaled(dtype: torch.dtype, factor: float) -> None:
    """For any number of elements: sums modulo a power of two would come out even for some."""
    for n in (1, 32, 512, 4_096, 1 << 16):
        values = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(n)).sign() + 0.25
        assert device_copies._words(values) != device_copies._words(values * factor)
        assert device_copies._words(values) != device_copies._words(values.clamp(-0.01, 0.01))


def test_second_backward_is_taken_in_order(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    model.backward(4.0)
    model.fill()
    model.assert_sent(7, 7, 7)


def test_gradient_that_is_none_is_absent_and_comes_back(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    model.fill()
    for parameter in model.parameters:
        parameter.grad = None
    model.backward(5.0, only=1)
    model.fill()
    assert set(sent_now(model.buffers, 1).tolist()) == {5.0}


def test_other_tensors_may_be_pushed_between(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies))
    model.backward(3.0)
    model.buffers.fill([torch.full((6, 4), 9.0), None, None, None])
    assert set(sent_now(model.buffers, 0).tolist()) == {9.0}
    model.fill()
    model.assert_sent(3, 3, 3)


def test_next_slot_is_filled_anew(engine: FakeEngine, copies: DeviceCopies) -> None:
    model = Model(made_buffers(copies, slots=2))
    model.backward(3.0)
    model.fill()
    model.buffers.next_slot()
    model.assert_sent(0, 0, 0)
    model.fill()
    model.assert_sent(3, 3, 3)
    model.backward(1.0, only=0)
    model.buffers.next_slot()
    model.fill()
    model.assert_sent(4, 3, 3)


def test_small_gradients_are_left_to_the_push(
    engine: FakeEngine, copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "EARLY_BYTES_MIN", 97)
    model = Model(made_buffers(copies))
    model.backward(3.0)
    assert len(engine.out.waiting) == 1  # the one of 40 float64
    model.fill()
    model.assert_sent(3, 3, 3)


def test_gradient_of_another_kind_is_left_to_the_push_which_refuses_it(copies: DeviceCopies) -> None:
    buffers = made_buffers(copies)
    assert buffers.take(0, torch.zeros(24)) is None
    assert buffers.take(0, torch.zeros(6, 4, dtype=torch.float64)) is None
    assert buffers.take(0, torch.eye(6)[:, :4].to_sparse()) is None
    assert buffers.take(0, torch.zeros(4, 6).t()) is not None


def test_no_gradient_is_kept_alive(engine: FakeEngine, copies: DeviceCopies) -> None:
    buffers = made_buffers(copies)
    gradient = torch.ones(6, 4)
    buffers.take(0, gradient)
    engine.out.catch_up()
    taken = copies._taken[0]
    del gradient
    assert taken.gradient() is None


# --- values


def landed(buffers: FlatBuffers, value: int) -> None:
    np.frombuffer(buffers.values.stream_buffer(SERVER), np.uint8)[:] = value
    buffers.values.note_streamed(SERVER)
    buffers.values.flip()


def targets() -> dict[int, torch.Tensor]:
    return {index: torch.zeros(spec.shape, dtype=torch_dtype(spec)) for index, spec in enumerate(SPECS)}


def bytes_of(tensor: torch.Tensor) -> set[int]:
    return set(np.frombuffer(tensor.numpy().tobytes(), np.uint8).tolist())


def test_computation_waits_for_values_and_the_host_does_not(engine: FakeEngine, copies: DeviceCopies) -> None:
    buffers, held = made_buffers(copies), targets()
    landed(buffers, 1)
    buffers.values.load(held)
    assert engine.back.follows == 1
    assert engine.back.waiting
    (event,) = engine.back.led
    assert event.waits == 0
    event.synchronize()
    assert all(bytes_of(tensor) == {1} for tensor in held.values())
    assert {tensor.data_ptr() for tensor in held.values()} <= set(engine.back.kept)


def test_settled_values_do_not_need_their_memory(engine: FakeEngine, copies: DeviceCopies) -> None:
    buffers, held = made_buffers(copies), targets()
    landed(buffers, 1)
    memory = buffers._by_server[SERVER].stream_buffers[0]
    buffers.values.load(held)
    buffers.values.await_copies()
    memory[:] = 77
    assert all(bytes_of(tensor) == {1} for tensor in held.values())
    buffers.values.await_copies()


def test_parameters_on_a_device_are_no_views(engine: FakeEngine, copies: DeviceCopies) -> None:
    buffers, held = made_buffers(copies), targets()
    landed(buffers, 1)
    before = [tensor.data_ptr() for tensor in held.values()]
    buffers.values.load(held, view=True)
    buffers.values.await_copies()
    assert [tensor.data_ptr() for tensor in held.values()] == before
    assert all(bytes_of(tensor) == {1} for tensor in held.values())


# --- memory


def test_buffers_are_pinned_and_given_back(engine: FakeEngine, copies: DeviceCopies) -> None:
    for shareable in (False, True):
        buffers = made_buffers(copies, shareable=shareable)
        owner = buffers._by_server[SERVER]
        landed(buffers, 1)
        pinned = {owner.gradients.ctypes.data, *(landing.ctypes.data for landing in owner.stream_buffers)}
        assert engine.pinned.keys() == pinned
        assert {read_only for _, read_only in engine.pinned.values()} == {False}
        assert all(address % 4_096 == 0 for address in pinned)
        buffers.values.load(targets())
        buffers.close()
        assert not engine.pinned
        assert not engine.back.waiting


def test_refused_pinning_is_told_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("cudaHostRegister: error 801")
    copies = copies_for([torch.zeros(1)], lambda where: engine)
    assert copies is not None
    with caplog.at_level(logging.INFO, "shardyard.worker"):
        model = Model(made_buffers(copies))
        landed(model.buffers, 0)
        model.backward(3.0)
        model.fill()
    model.assert_sent(3, 3, 3)
    assert engine.refused == 3
    assert [record.message for record in caplog.records if "pinned" in record.message] == [
        "copies to and from the GPU are slower: memory could not be pinned (cudaHostRegister: error 801)"
    ]
    model.buffers.close()


def having(memory: SharedMemory) -> InProcessDescriptors:
    """The end of a stream to which a descriptor of this memory has come."""
    here, there = InProcessDescriptors.pair()
    there.pass_descriptors([memory.descriptor()])
    return here


def test_server_memory_is_shared_and_pinned_to_be_read(engine: FakeEngine, copies: DeviceCopies) -> None:
    """A private mapping would get pages of its own by being pinned, and never see another version."""
    buffers = made_buffers(copies)
    with contextlib.closing(SharedMemory(10_000, read_only=True)) as theirs:
        found = buffers.values.attach(SERVER, theirs.ticket(), having(theirs))
        assert not found.private
        assert engine.pinned[found.bytes.ctypes.data] == (10_000, True)
        theirs.bytes[:] = 5
        into = torch.zeros(10_000, dtype=torch.uint8)
        copies.bring([(into, tensor_of(found.bytes))])
        buffers.values.forget(SERVER)  # waits, since the memory may go
        assert bytes_of(into) == {5}
        assert found.bytes.ctypes.data not in engine.pinned
        theirs.bytes[:] = 6
        assert bytes_of(tensor_of(found.bytes)) == {6}


def test_where_some_parameters_are_on_the_cpu_server_memory_stays_private(engine: FakeEngine) -> None:
    other = torch.zeros(1, device="meta")
    copies = copies_for([torch.zeros(1), other], lambda where: engine if where.type == "cpu" else None)
    assert copies is not None
    assert not copies.alone
    buffers = made_buffers(copies)
    with contextlib.closing(SharedMemory(100, read_only=True)) as theirs:
        assert buffers.values.attach(SERVER, theirs.ticket(), having(theirs)).private


def test_tensor_of_memory_that_cannot_be_written(recwarn: pytest.WarningsRecorder) -> None:
    with contextlib.closing(SharedMemory(100, read_only=True)) as theirs:
        theirs.bytes[:] = 3
        tensor = tensor_of(attach(theirs.ticket()).bytes)
        theirs.bytes[0] = 4
    assert tensor.tolist() == [4] + 99 * [3]
    assert not recwarn.list


# --- without a GPU


def test_cpu_and_other_devices_need_no_copies() -> None:
    assert engine_of(CPU) is None
    assert engine_of(torch.device("meta")) is None
    assert copies_for([torch.zeros(3), torch.zeros(3, device="meta")]) is None
    assert copies_for([]) is None
    assert not torch.cuda.is_initialized()


def test_tensors_are_put_into_arrays() -> None:
    given = [
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor([1.5], dtype=torch.float16),
        torch.tensor([2.5], dtype=torch.float64).expand(3),
    ]
    for copies in (DeviceCopies(), DeviceCopies(lambda where: FakeEngine())):
        found = copies.to_host(given)
        assert [each.tolist() for each in found] == [[1], [], [0, 3, 1, 4, 2, 5], [1.5], [2.5, 2.5, 2.5]]
        assert [str(each.dtype) for each in found] == ["uint8", "float32", "int32", "float16", "float64"]


def test_encoders_work_between_what_was_and_what_comes(engine: FakeEngine, copies: DeviceCopies) -> None:
    coding = copies._known(CPU).coding
    assert isinstance(coding, FakeLane)
    gradient = torch.ones(3)
    with copies.beside([CPU], [gradient]):
        assert (coding.follows, coding.within) == (1, 1)
        assert not coding.led
        assert copies.to_host([gradient, gradient.double()])[1].tolist() == [1, 1, 1]
    assert len(coding.led) == 1
    assert gradient.data_ptr() in coding.kept


def test_wanted_is_put_in_order_where_the_work_is_done() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    into = torch.zeros(2), torch.zeros(4)
    wanted = DeviceCopy(0, tensor, into, (0, 2))
    for target, values in wanted.pairs():
        target.copy_(values)
    assert torch.cat(into).tolist() == [0, 3, 1, 4, 2, 5]
