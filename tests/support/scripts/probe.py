"""A training script for tests. Trains, and writes what came out as JSON to the path given.

`model`: a small network with BatchNorm, Dropout and a learning-rate schedule; the digest of all its values is written.
`count`: one coordinate for each sample; a sample's gradient adds 1 to its own, so lost and doubled ones show; in a
    synchronous job with `--ranks`.
`rows`: an embedding table; a sample's gradient adds 1 to a row of its own, in a synchronous job whatever its share.
`words`: a network on top of bags of rows, which learns; the digest of all its values, rows among them, is written.
`own`: four variables, to all of which each push adds 1, without leased data.
`sums`: a matrix, to which each sample adds whole numbers of its own; what compression has not sent is written too, also
    where it is held.
`loader`: the network again, with a DataLoader of its own and two loader processes.
`stages`: a deeper network in float64, by job.train_step; the loss of each step is written.
`stage-mistakes`: what a script must not do with it; the errors are written.
`stage-counts`: a coordinate for each sample in each of two stages; counts as in `count`. With `--ranks` and
`--accumulate`, and with `--with-rows` in a table, too. `tensor-counts`: the same beside layers that can be cut.
`cut-mistakes`: what a script must not do with shards, or with layers that are cut; the errors are written.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import shardyard as sy
from shardyard.domain.consistency import UpdateMode
from shardyard.transport import grpc_client
from shardyard_worker.collectives import shared_members
from shardyard_worker.exchange.server_group import ServerGroup


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3)
    )


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.removeprefix("_orig_mod.").encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def train_model(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    model = network()
    if options.compile:
        model = torch.compile(model, backend=options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    model, moved, schedule = job.prepare(model, optimizer, scheduler)
    model.train()
    batches = job.batches(data(options.samples), batch_size=8, epochs=options.epochs)
    if options.mode == "loader":
        loader = DataLoader(data(options.samples), batch_size=8, num_workers=2)
        batches = (batch for _ in range(options.epochs) for batch in loader)
    computed = 0
    for x, y in batches:
        time.sleep(options.pause_ms / 1000)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        moved.zero_grad(set_to_none=True)
        loss.backward()
        moved.step()
        schedule.step()
        job.log(loss=loss)
        computed += 1
        announce(computed)
        hold(options, computed)
        if computed == options.stop_at:
            job.stop(f"computed {computed}")
        if options.mode == "loader" and job.should_stop:
            break
    return {"digest": digest(model), "loss": float(loss.detach()) if computed else None, "computed": computed}


def train_count(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    counts = torch.nn.Parameter(torch.zeros(options.samples, dtype=torch.float64))
    model = torch.nn.ParameterList([counts])
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    computed = 0
    data, often = TensorDataset(torch.arange(options.samples)), {"accumulate": options.accumulate}
    if options.sampler is None:
        batches = job.batches(data, batch_size=4, epochs=options.epochs, **often)
    else:
        loader = DataLoader(data, batch_sampler=job.sampler(data, batch_size=4), num_workers=options.sampler)
        batches = (batch for _ in range(options.epochs) for batch in loader)
    for (index,) in batches:
        time.sleep(options.pause_ms / 1000)
        # its part in the mean of a step is as much smaller as there are other ranks
        share = options.ranks if job.mode.value == "sync" else 1
        (-share * counts[index].sum()).backward()
        if job.step_due:
            optimizer.step()
            optimizer.zero_grad()
        computed += 1
        announce(computed)
        hold(options, computed)
        if computed == options.stop_at:
            job.stop(f"computed {computed}")
    return {"counts": counts.detach().tolist(), "computed": computed}


def deep_network(norm: type[torch.nn.Module] = torch.nn.LayerNorm) -> torch.nn.Module:
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.GELU()]
    layers += [torch.nn.Linear(16, 16), norm(16), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def train_stages(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(3)
    model = deep_network(torch.nn.BatchNorm1d if options.batch_norm else torch.nn.LayerNorm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, _, _ = job.prepare(model, optimizer, scheduler, loss=torch.nn.functional.cross_entropy)
    x, y = data(options.samples).tensors
    x[options.nan_samples] = float("nan")
    losses = []
    given = {"batch_size": options.batch, "epochs": options.epochs, "drop_last": True}
    for batch in job.batches(TensorDataset(x.double(), y), **given):
        losses.append(job.train_step(*batch).item())
        announce(len(losses))
        hold(options, len(losses))
        if len(losses) == options.stop_at:
            job.stop(f"computed {len(losses)}")
    model.eval()
    found = {"losses": losses, "computed": len(losses), "digest": digest(model)}
    return found | {"evaluated": torch.nn.functional.cross_entropy(model(x.double()), y).item()}


def make_mistakes(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    model = deep_network()
    x, y = data(14).tensors
    batches = TensorDataset(x.double(), y)
    loss = torch.nn.functional.cross_entropy
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    mistakes = {
        "step": optimizer.step,
        "forward": lambda: model(x.double()),
        "state": optimizer.state_dict,
        "batch": lambda: job.train_step(x[:6].double(), y[:6]),
        "samples": lambda: job.train_step(x[:8].double(), y[:4]),
        "last": lambda: job.batches(batches, batch_size=8, epochs=options.epochs),
    }

    def sample() -> None:
        for batch in DataLoader(batches, batch_sampler=job.sampler(batches, batch_size=4, drop_last=True)):
            time.sleep(2.0)  # a worker that is refused leaves, and the other one must have its batch then
            job.train_step(*batch)

    if job.mode is UpdateMode.ASYNC:
        mistakes["sampler"] = sample
    found = {}
    for name, make in mistakes.items():
        try:
            make()
        except sy.errors.InvalidRequest as error:
            found[name] = error.what
    with job.no_sync():
        try:
            job.train_step(x[:8].double(), y[:8])
        except sy.errors.InvalidRequest as error:
            found["no_sync"] = error.what
    if job.mode is UpdateMode.ASYNC:
        return {"errors": found}
    return {"errors": found, "loss": job.train_step(x[:8].double(), y[:8]).item()}


def make_mistakes_with_shards(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    model = Heads().double()
    x, y = data(14).tensors
    batches = TensorDataset(x.double(), y)
    loss = torch.nn.functional.cross_entropy
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)

    def accumulate() -> None:
        with job.no_sync():
            job.train_step(x[:8].double(), y[:8])

    def train() -> None:
        for batch in job.batches(batches, batch_size=4, drop_last=True):
            job.train_step(*batch)

    def train_twice() -> None:
        for batch in job.batches(batches, batch_size=4, drop_last=True):
            job.train_step(*batch)
            job.train_step(*batch)

    def sample() -> None:
        for batch in DataLoader(batches, batch_sampler=job.sampler(batches, batch_size=4, drop_last=True)):
            job.train_step(*batch)

    mistakes = {
        "step": optimizer.step,
        "forward": lambda: model(x.double()),
        "state": optimizer.state_dict,
        "accumulated": accumulate,
        "twice": train_twice,
        "sampler": sample,
        "last": lambda: job.batches(batches, batch_size=14),
        "own data": lambda: job.train_step(x[:8].double(), y[:8]),
        "values": model.state_dict,
        "plan": train,
    }
    found = {}
    for name in options.mistakes.split(","):
        try:
            mistakes[name]()
        except (sy.errors.InvalidRequest, sy.errors.UnsupportedModel) as error:
            found[name] = error.what
    return {"errors": found}


class Heads(torch.nn.Module):
    """Two heads, of a width that follows from the size of the layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(1, (2, -1))
        return self.out((heads * heads.softmax(2)).flatten(1))


class Counts(torch.nn.Module):
    """Adds to what comes in a number of its own for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, index: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given + self.counts[index]


class TwoCounts(torch.nn.Module):
    """The gradients of `nan_samples` are not finite in the first stage."""

    def __init__(self, samples: int, nan_samples: list[int]) -> None:
        super().__init__()
        self.first, self.second = Counts(samples), Counts(samples)
        self.spoiled = Spoiled(nan_samples)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.second(index, self.spoiled(self.first(index, index.double()), index))


class CountsBesideLayers(TwoCounts):
    """The layers add nothing."""

    def __init__(self, samples: int, nan_samples: list[int]) -> None:
        super().__init__(samples, nan_samples)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found = super().forward(index)
        return found + 0.0 * self.layers(found.unsqueeze(1)).squeeze(1)


class CountsOfRows(torch.nn.Module):
    """`counts`, and a row of a table for each sample. The gradients of the rows of `nan_samples` are not finite."""

    def __init__(self, counts: TwoCounts, optimizer: sy.tables.Optimizer, nan_samples: list[int]) -> None:
        super().__init__()
        self.counts = counts
        table = sy.tables.Table(1, name="counts", optimizer=optimizer, initial=sy.tables.zeros())
        self.rows, self.spoiled = sy.Embedding(1, table=table), Spoiled(nan_samples)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        if isinstance(self.counts, CountsBesideLayers):  # before the members of a tensor-parallel replica meet
            return self._of_rows(index) + self.counts(index)
        return self.counts(index) + self._of_rows(index)

    def _of_rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.spoiled(self.rows(index * 1_000_003).squeeze(1), index).double()


class Spoiled(torch.nn.Module):
    """What comes in, whose gradients are NaN for some samples."""

    def __init__(self, samples: list[int]) -> None:
        super().__init__()
        self._samples = torch.tensor(samples, dtype=torch.int64)

    def forward(self, given: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if given.requires_grad and self._samples.numel():
            spoiled = torch.isin(index, self._samples)
            given = given.view_as(given)  # a stage gets the same tensor for each batch, and it keeps its hooks
            given.register_hook(lambda gradient: gradient.masked_fill(spoiled, float("nan")))
        return given


def sign_of_rows() -> sy.tables.Adam:
    """Its step is 1, whatever the gradient's size."""
    return sy.tables.Adam(lr=1.0, betas=(0.0, 0.0), eps=1e-30)


def train_stage_counts(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    counts = CountsBesideLayers if options.mode == "tensor-counts" else TwoCounts
    counted = counts(options.samples, [] if options.with_rows else options.nan_samples)
    # a step has four samples of each rank, or several times as many
    lr = 4.0 * options.ranks * options.accumulate
    of_rows = sy.tables.SGD(lr=lr) if job.mode is UpdateMode.ASYNC else sign_of_rows()
    model = CountsOfRows(counted, of_rows, options.nan_samples) if options.with_rows else counted
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    job.prepare(model, optimizer, loss=lambda output, target: (target - output).mean())
    computed = 0
    index = torch.arange(options.samples)
    data = TensorDataset(index, torch.zeros(options.samples))
    ahead = {"look_ahead": lambda batch: {model.rows: batch[0] * 1_000_003}} if options.look_ahead else {}
    for batch in job.batches(data, batch_size=4, epochs=options.epochs, accumulate=options.accumulate, **ahead):
        time.sleep(options.pause_ms / 1000)
        if options.poison in batch[0].tolist() and job._loop.strategy._inside.place == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        job.train_step(*batch)
        computed += 1
        announce(computed)
        hold(options, computed)
        if computed == options.stop_at:
            job.stop(f"computed {computed}")
    counts = [counted.first.counts.tolist(), counted.second.counts.tolist()]
    if options.with_rows:
        counts.append(model.rows(index * 1_000_003).flatten().tolist())
    return {"counts": counts, "computed": computed}


def train_two_sets(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    """The workers at some places of an asynchronous replica leave the first data set early."""
    model = TwoCounts(options.samples, [])
    job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=4.0), loss=lambda output, target: (target - output).mean()
    )
    data = TensorDataset(torch.arange(options.samples), torch.zeros(options.samples))
    computed = []
    for leavers in (options.leavers, []):
        computed.append(0)
        for batch in job.batches(data, batch_size=4):
            place = job._loop.strategy._inside.place
            time.sleep(options.pause_ms / 1000)
            job.train_step(*batch)
            computed[-1] += 1
            announce(sum(computed))
            hold(options, sum(computed))
            if computed[-1] >= 3 and place in leavers:
                break
    return {"computed": computed, "counts": [model.first.counts.tolist(), model.second.counts.tolist()]}


def train_rows(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    optimizer = sy.tables.SGD(lr=1.0) if job.mode.value == "async" else sign_of_rows()
    expiry = sy.tables.Expiry(age_seconds=options.age_seconds)
    table = sy.tables.Table(1, name="counts", optimizer=optimizer, initial=sy.tables.zeros(), expiry=expiry)
    model = torch.nn.ModuleDict({"counts": sy.Embedding(1, table=table), "beside": torch.nn.Linear(3, 2)})
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    computed = 0
    ahead = {"look_ahead": lambda batch: {model["counts"]: batch[0] * 1_000_003}} if options.look_ahead else {}
    data = TensorDataset(torch.arange(options.samples))
    for (index,) in job.batches(data, batch_size=4, epochs=options.epochs, **ahead):
        time.sleep(options.pause_ms / 1000)
        optimizer.zero_grad()
        (-model["counts"](index * 1_000_003)).sum().backward()
        optimizer.step()
        computed += 1
        announce(computed)
    totals = model["counts"](torch.arange(options.samples) * 1_000_003).flatten()
    source = table.source
    hits = source.came_ahead / max(1, source.looked_up)
    return {"totals": totals.tolist(), "rows": len(table), "computed": computed, "hits": hits}


def train_words(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(5)
    ids = torch.randint(-40, 40, (options.samples, 5)) * 0x1_0000_0001
    data = TensorDataset(
        ids, torch.randn(options.samples, 1)
    )  # before job.prepare: afterwards each worker has its own seed
    words = sy.tables.Table(4, name="words", seed=3, optimizer=sy.tables.Adagrad(lr=0.3))
    model = torch.nn.ModuleDict({"words": sy.EmbeddingBag(4, "mean", table=words), "top": torch.nn.Linear(4, 1)})
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    computed = 0
    ahead = {"look_ahead": lambda batch: {model["words"]: batch[0]}} if options.look_ahead else {}
    for chosen, wanted in job.batches(data, batch_size=4, epochs=options.epochs, **ahead):
        time.sleep(options.pause_ms / 1000)
        optimizer.zero_grad()
        loss = (model["top"](model["words"](chosen)) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        computed += 1
        announce(computed)
        if computed == options.stop_at:
            job.stop(f"computed {computed}")
    found = {"digest": digest(model), "rows": len(words), "computed": computed, "hits": words.source.came_ahead}
    return found | {"loss": float(loss.detach()) if computed else None}


def whole_numbers(samples: int) -> torch.Tensor:
    """What each sample adds to the matrix."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-8, 9, (samples, 20, 30), generator=generator).float()


def train_sums(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    sums = torch.nn.Parameter(torch.zeros(20, 30))
    model = torch.nn.ParameterList([sums])
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    given = whole_numbers(options.samples)
    computed = 0
    for (added,) in job.batches(TensorDataset(given), batch_size=4, epochs=options.epochs):
        time.sleep(options.pause_ms / 1000)
        optimizer.zero_grad()
        (-(sums * added).sum()).backward()
        optimizer.step()
        computed += 1
        if computed == options.hold_at:
            with open(f"{options.out}.held", "w") as file:
                json.dump(job.compression_state()["residual.0"].tolist(), file)
        announce(computed)
        hold(options, computed)
    state = job.compression_state()
    return {"sums": sums.detach().tolist(), "residual": state["residual.0"].tolist(), "computed": computed}


def train_own(job: sy.Job, options: argparse.Namespace) -> dict[str, object]:
    job.register({f"v{index}": torch.zeros(16, dtype=torch.float64) for index in range(4)}, optimizer="sgd", lr=1.0)
    for computed in range(1, options.samples + 1):
        time.sleep(options.pause_ms / 1000)
        if computed == options.checkpoint_at:
            print(f"took checkpoint {job.checkpoint()}", flush=True)
        job.push({f"v{index}": -torch.ones(16, dtype=torch.float64) for index in range(4)})
        announce(computed)
    return {"values": {name: value.tolist() for name, value in job.pull().items()}}


def hold(options: argparse.Namespace, computed: int) -> None:
    while computed == options.hold_at and not os.path.exists(options.hold):
        time.sleep(0.01)


def lose(job: sy.Job, options: argparse.Namespace) -> None:
    """The first worker that is at that place of its pipeline when it sends its push of that number gets the signal."""
    place, number, how = options.lose
    push_pull, pushes = ServerGroup.push_pull, itertools.count(1)

    def lost(group: ServerGroup, *given: Any) -> Any:
        if job._loop.strategy._inside.place == int(place) and next(pushes) == int(number):
            with contextlib.suppress(FileExistsError), open(f"{os.path.dirname(options.out)}/lost", "x"):
                print("is lost", flush=True)
                os.kill(os.getpid(), int(how))
        return push_pull(group, *given)

    ServerGroup.push_pull = lost  # type: ignore[method-assign]


def announce(computed: int) -> None:
    print(f"computed {computed}", flush=True)


MODES = {
    "model": train_model,
    "loader": train_model,
    "count": train_count,
    "stages": train_stages,
    "stage-counts": train_stage_counts,
    "tensor-counts": train_stage_counts,
    "stage-mistakes": make_mistakes,
    "cut-mistakes": make_mistakes_with_shards,
    "two-sets": train_two_sets,
    "rows": train_rows,
    "words": train_words,
    "sums": train_sums,
    "own": train_own,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=tuple(MODES))
    parser.add_argument("out")
    parser.add_argument("--samples", type=int, default=203)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch of `stages`")
    parser.add_argument("--mistakes", default="", help="those of cut-mistakes that are made")
    parser.add_argument("--batch-norm", action="store_true", help="in the network of `stages`")
    parser.add_argument("--nan-samples", type=int, nargs="*", default=[], help="samples of `stages` that are NaN")
    parser.add_argument("--with-rows", action="store_true", help="counts in rows of a table, too")
    parser.add_argument("--ranks", type=int, default=1, help="logical ranks, whose shares of each step are equal")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sampler", type=int, help="counts with job.sampler and a loader with so many processes")
    parser.add_argument("--compile", default="", help="the backend of torch.compile")
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--checkpoint-at", type=int, default=0)
    parser.add_argument("--hold-at", type=int, default=0)
    parser.add_argument("--hold", default="")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--look-ahead", action="store_true", help="rows of the next batch come with a step")
    parser.add_argument("--age-seconds", type=float, default=0.0, help="rows go that were not pushed for so long")
    parser.add_argument("--own-handler", action="store_true", help="the script handles SIGTERM itself")
    parser.add_argument("--poison", type=int, default=-1, help="a sample that ends the first worker of a pipeline")
    parser.add_argument("--leavers", type=int, nargs="*", default=[], help="places of two-sets")
    parser.add_argument("--lose", nargs=3, metavar=("PLACE", "PUSH", "SIGNAL"), help="one worker, before it pushes")
    parser.add_argument("--patient", action="store_true", help="does not notice by itself that a peer is frozen")
    parser.add_argument("--machine", default="", help="shares memory with scripts of the same name only")
    options = parser.parse_args()
    if options.machine:
        shared_members.this_machine = lambda: options.machine
    if options.patient:
        pings = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
        grpc_client.OPTIONS = tuple((name, 600_000 if name in pings else value) for name, value in grpc_client.OPTIONS)
    with sy.connect() as job:
        if options.lose:
            lose(job, options)
        if options.own_handler:
            signal.signal(signal.SIGTERM, lambda *_: (print("the script's own handler", flush=True), job.drain()))
        result = MODES[options.mode](job, options)
        result |= {"should_stop": job.should_stop, "reason": job.stopping and job.stopping.reason}
        result |= {"step": job.step, "chief": job.chief, "pid": os.getpid(), "threads": torch.get_num_threads()}
    with open(options.out, "w") as file:
        json.dump(result, file)
    sys.exit(0)


if __name__ == "__main__":
    main()
