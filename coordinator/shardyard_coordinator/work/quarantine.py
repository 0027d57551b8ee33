"""Batches that do not count because they kill their workers or have no finite gradient (promise 2; rules A4, A13).

Owns: `Suspects`, the leased sources at which workers have died, and what each worker there has announced to compute;
`Quarantine`, the batches and steps that are pushed empty from now on. Invariants: a death is attributed to a batch only
if its worker had announced it. A batch is condemned for deaths only while no partition has counted it, and the verdict
is final. Must not know: servers, members, time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain import limits
from shardyard.domain.ids import Incarnation, Rank
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankSource
from shardyard_coordinator.records import Body, Entry, checked_items, checked_number, require

CAREFUL_STEPS: Final = 2
"""After the death of a worker, the steps of its logical ranks are announced for this many steps."""
SUSPECTS_MAX: Final = 65_536
"""The number of sources at which workers died that are remembered: the latest."""
QUARANTINED_MAX: Final = 10_000
"""Batches of a job in quarantine. A job that loses more workers to its data has another problem."""


@dataclass(frozen=True, slots=True)
class QuarantinedWork:
    """A batch of a data shard, or a step of a logical rank, that does not count. `deaths`: how many workers died there.
    `parameter`: the parameter whose gradient was not finite, as `worker` reported."""

    source: LeasedSource
    sequence: int
    deaths: int = 0
    parameter: str = ""
    worker: Incarnation = Incarnation(0)

    @property
    def entry(self) -> Entry:
        body = {**source_body(self.source), "sequence": self.sequence, "deaths": self.deaths}
        return "batch_quarantined", body | (
            {"parameter": self.parameter, "worker": self.worker} if self.parameter else {}
        )


class Quarantine:
    """Iteration is in the order of the verdicts."""

    def __init__(self) -> None:
        self._condemned: list[QuarantinedWork] = []
        self._of: dict[LeasedSource, list[int]] = {}

    def __len__(self) -> int:
        return len(self._condemned)

    def __iter__(self) -> Iterator[QuarantinedWork]:
        return iter(self._condemned)

    @property
    def full(self) -> bool:
        return len(self) >= QUARANTINED_MAX

    def add(self, condemned: QuarantinedWork) -> None:
        assert not self.has(condemned.source, condemned.sequence), condemned
        self._condemned.append(condemned)
        self._of.setdefault(condemned.source, []).append(condemned.sequence)

    def has(self, source: LeasedSource, sequence: int) -> bool:
        return sequence in self._of.get(source, ())

    def end(self, source: LeasedSource) -> int:
        """One more than the source's last condemned sequence; 0 if it has none."""
        return max(self._of.get(source, ()), default=-1) + 1

    # ---- records

    def entries(self) -> list[Entry]:
        return [each.entry for each in self._condemned]

    def restore(self, body: Body) -> QuarantinedWork:
        """Applies a record of `entries`. The caller must check its source. Raises DamagedRecord."""
        sequence, not_finite = body.number("sequence", most=limits.SEQUENCE_MAX), body.has("parameter")
        condemned = QuarantinedWork(
            source_of(body),
            sequence,
            body.number("deaths", least=0 if not_finite else 1),
            body.text("parameter") if not_finite else "",
            Incarnation(body.number("worker", least=1) if not_finite else 0),
        )
        require(not self.has(condemned.source, sequence), f"#{sequence} of {condemned.source} is quarantined twice")
        self.add(condemned)
        return condemned


@dataclass(slots=True)
class _Suspect:
    """`since`: the sequence announced first after the last death. `at`: how many workers died at each sequence."""

    since: int | None = None
    at: dict[int, int] = field(default_factory=dict)


class Suspects:
    """The job's sources at which workers have died. `deaths_max`: the deaths that condemn a batch; 0: none ever is."""

    def __init__(self, deaths_max: int) -> None:
        self._deaths_max = deaths_max
        self._suspects: dict[LeasedSource, _Suspect] = {}
        self._begun: dict[Incarnation, tuple[LeasedSource, int]] = {}

    def has(self, source: LeasedSource) -> bool:
        return source in self._suspects

    def deaths(self, source: LeasedSource, sequence: int) -> int:
        """How many workers have died at it. The first death at a source was not announced, and counts for each of its
        batches."""
        suspect = self._suspects.get(source)
        return 0 if suspect is None else 1 + suspect.at.get(sequence, 0)

    def condemns(self, source: LeasedSource, sequence: int) -> bool:
        return bool(self._deaths_max) and self.deaths(source, sequence) >= self._deaths_max

    def begin(self, worker: Incarnation, source: LeasedSource, sequence: int) -> Entry | None:
        """The worker announces that it computes this sequence of its own source. None if no worker has died there."""
        suspect = self._suspects.get(source)
        if suspect is None:
            return None
        entry: Entry = ("batch_begun", {"worker": worker, **source_body(source), "sequence": sequence})
        since = suspect.since = sequence if suspect.since is None else suspect.since
        if isinstance(source, RankSource) and sequence >= since + CAREFUL_STEPS:
            self.clear(source)
        else:
            self._begun[worker] = source, sequence
        return entry

    def lose(self, worker: Incarnation, held: Iterable[LeasedSource]) -> None:
        """The worker has died while it held these."""
        begun = self._begun.pop(worker, None)
        if not self._deaths_max:
            return
        for source in held:
            self._suspects.setdefault(source, _Suspect()).since = None
        # the source may also have gone to a worker that joined before this death was known
        suspect = None if begun is None else self._suspects.get(begun[0])
        if begun is not None and suspect is not None:
            suspect.at[begun[1]] = suspect.at.get(begun[1], 0) + 1
        while len(self._suspects) > SUSPECTS_MAX:
            self.clear(next(iter(self._suspects)))

    def leave(self, worker: Incarnation) -> None:
        """The worker no longer computes what it announced."""
        self._begun.pop(worker, None)

    def clear(self, source: LeasedSource) -> None:
        """No worker died there again, and none will."""
        self._suspects.pop(source, None)
        self._begun = {worker: begun for worker, begun in self._begun.items() if begun[0] != source}

    # ---- records

    def entries(self) -> list[Entry]:
        found: list[Entry] = [
            (
                "source_suspected",
                {**source_body(source), "since": each.since, "at": [list(died) for died in each.at.items()]},
            )
            for source, each in self._suspects.items()
        ]
        for worker, (source, sequence) in self._begun.items():
            body = {"worker": worker, **source_body(source), "sequence": sequence, "stands": True}
            found.append(("batch_begun", body))
        return found

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        source = source_of(body)
        if kind == "batch_begun":
            worker = Incarnation(body.number("worker", least=1))
            begun = body.number("sequence", most=limits.SEQUENCE_MAX)
            if body.has("stands") and source in self._suspects:  # another worker may have died at the source since
                self._begun[worker] = source, begun
            else:
                self.begin(worker, source, begun)
            return
        since = None if body.is_null("since") else body.number("since", most=limits.SEQUENCE_MAX)
        suspect = self._suspects[source] = _Suspect(since)
        for each in body.items("at"):
            sequence, count = checked_items(each, "a batch and its deaths", count=2)
            died_at = checked_number(sequence, "a batch", most=limits.SEQUENCE_MAX)
            suspect.at[died_at] = checked_number(count, "its deaths", least=1)


def source_body(source: LeasedSource) -> dict[str, object]:
    """The form of a source in records."""
    if isinstance(source, RankSource):
        return {"rank": source.rank}
    return {"feed": source.feed, "epoch": source.epoch, "index": source.index}


def source_of(body: Body) -> LeasedSource:
    """Raises DamagedRecord."""
    if body.has("rank"):
        return RankSource(Rank(body.number("rank", most=limits.LOGICAL_RANKS_MAX - 1)))
    return DataShardSource(body.number("feed"), body.number("epoch"), body.number("index"))
