"""A feed: a data set as one call of `job.batches` reads it, in data shards or in steps.

Owns: the spec of a feed, what workers and people are told about it, and its first record. Invariants: the first worker
that opens a feed decides its spec, and a worker with another spec is refused. An accepted spec is within bounds. Must
not know: which samples belong to which worker, which are done (data_ledger, step_ledger).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardyard.domain import limits
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import FeedConflict, InvalidRequest, TooLarge
from shardyard_coordinator.records import Body, Entry, checked_items, checked_text, require
from shardyard_coordinator.work.quarantine import QuarantinedWork


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """How a data set is read. `batch_size` is per worker (asynchronous) or per logical rank (synchronous). `accumulate`
    batches make a step."""

    samples: int
    fingerprint: str
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool
    accumulate: int = 1

    def check(self) -> None:
        """Raises InvalidRequest or TooLarge."""
        for name, value, value_max in (
            ("samples", self.samples, limits.SAMPLES_MAX),
            ("batch_size", self.batch_size, limits.BATCH_SIZE_MAX),
            ("accumulate", self.accumulate, limits.ACCUMULATE_MAX),
            ("epochs", self.epochs, limits.EPOCHS_MAX),
        ):
            if value < 1:
                raise InvalidRequest(f"a feed with {name} {value}; expected at least 1", todo="check job.batches' call")
            if value > value_max:
                raise TooLarge(f"a feed with {name} {value}; at most {value_max} are taken")

    def units(self, samples_per_unit: int, what: str) -> int:
        """Batches, or steps, of an epoch. Raises InvalidRequest if drop_last leaves none."""
        full, rest = divmod(self.samples, samples_per_unit)
        if self.drop_last and not full:
            raise InvalidRequest(
                f"{self.samples} samples are fewer than one {what} of {samples_per_unit}, and drop_last drops it",
                todo="choose a smaller batch_size, or drop_last=False",
            )
        return full if self.drop_last or not rest else full + 1

    @property
    def samples_by_batches(self) -> int:
        """The samples of an epoch that count if it is dealt by batches."""
        return min(self.units(self.batch_size, "batch") * self.batch_size, self.samples)

    def cut(self, logical_ranks: int, local_steps: int) -> EpochPlan:
        """Cuts an epoch into steps, or rounds, of a synchronous job."""
        return EpochPlan(
            self.samples, self.batch_size, logical_ranks, self.drop_last, self.accumulate, local_steps=local_steps
        )


@dataclass(frozen=True, slots=True)
class FeedOpening:
    """What a worker must know to read a feed. `units_per_epoch`: data shards, or steps. `begun`: what counted when the
    job became synchronous: whole epochs, and samples of the next one. `has_later`: of an asynchronous job: a later feed
    was opened."""

    batches_per_data_shard: int
    units_per_epoch: int
    first_step: int
    done: bool
    begun: tuple[int, int] = (0, 0)
    has_later: bool = False


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """All the work that is left is held by other workers."""

    waiting_for: str


@dataclass(frozen=True, slots=True)
class FeedDone:
    """Every sample of every epoch has been counted."""


@dataclass(frozen=True, slots=True)
class FeedCounts:
    """The units of all epochs by state."""

    feed: int
    samples: int
    epochs: int
    free: int
    leased: int
    done: int
    finished: bool
    quarantined: int


@dataclass(frozen=True, slots=True)
class QuarantinedBatch:
    """A batch that does not count. Its samples are the positions [begin, end) of the epoch's permutation."""

    feed: int
    epoch: int
    condemned: QuarantinedWork
    begin: int
    end: int


def check_opening(feed: int, spec: FeedSpec, opened: Sequence[FeedSpec]) -> None:
    """`opened`: the known feeds, by number. Raises FeedConflict, InvalidRequest, TooLarge."""
    spec.check()
    if feed >= limits.FEEDS_MAX:
        raise TooLarge(
            f"feed {feed}; a job has at most {limits.FEEDS_MAX}", todo="pass epochs to one call of job.batches"
        )
    if feed > len(opened):
        raise FeedConflict(f"feed {feed} was opened while {len(opened)} feeds are known; expected feed {len(opened)}")
    if feed == len(opened):
        return
    first = opened[feed]
    differing = [
        each.name for each in dataclasses.fields(spec) if getattr(spec, each.name) != getattr(first, each.name)
    ]
    if differing:
        said = ", ".join(
            "its samples differ"
            if name == "fingerprint"
            else f"{name}: expected {getattr(first, name)!r}, got {getattr(spec, name)!r}"
            for name in differing
        )
        raise FeedConflict(f"feed {feed} was opened before in another way ({said})", facts={"differs": differing[0]})


def feed_opened(feed: int, spec: FeedSpec, opening: FeedOpening) -> Entry:
    """The record of a feed, with what was decided about it."""
    epochs, samples = opening.begun
    begun = {"begun_epochs": epochs, "begun_samples": samples} if epochs or samples else {}
    return "feed_opened", {
        "feed": feed,
        **dataclasses.asdict(spec),
        "batches_per_data_shard": opening.batches_per_data_shard,
        "units": opening.units_per_epoch,
        "first_step": opening.first_step,
        **begun,
    }


def feed_of(body: Body, feed: int) -> tuple[int, FeedSpec]:
    """Reads the record that opens feed `feed`. Raises DamagedRecord if it opens another, or is out of bounds."""
    require(body.number("feed") == feed, f"feed {body.number('feed')} was opened where feed {feed} is the next")
    spec = FeedSpec(
        samples=body.number("samples", least=1, most=limits.SAMPLES_MAX),
        fingerprint=body.text("fingerprint"),
        batch_size=body.number("batch_size", least=1, most=limits.BATCH_SIZE_MAX),
        epochs=body.number("epochs", least=1, most=limits.EPOCHS_MAX),
        shuffle=body.flag("shuffle"),
        drop_last=body.flag("drop_last"),
        # feeds that an earlier release opened have none
        accumulate=body.number("accumulate", least=1, most=limits.ACCUMULATE_MAX) if body.has("accumulate") else 1,
    )
    return feed, spec


def entries_of(kept: Mapping[str, object]) -> Iterator[tuple[str, Body]]:
    """The records in a checkpoint's data ledger. Raises DamagedRecord."""
    for item in Body(kept).items("entries"):
        kind, body = checked_items(item, "an entry", count=2)
        require(isinstance(body, dict), "an entry without a body")
        assert isinstance(body, dict)
        yield checked_text(kind, "an entry"), Body(body)
