"""Which launches have joined a job, so that none of their processes trains it again when it is finished.

Owns: for each launch, the number of its run that this job is. Invariants: a launch's number does not change; of more
than RUNS_MAX launches the latest are kept. Must not know: workers, other jobs, how the job ended.
"""

from __future__ import annotations

from typing import Final

from shardyard.domain import limits
from shardyard.domain.ids import RunName
from shardyard_coordinator.records import Body, Entry

RUNS_MAX: Final = 1_024


class Runs:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """The launches, the latest last."""
        return tuple(self._numbers)

    def number_of(self, launch: str) -> int | None:
        """Which of the launch's runs this job is. None: the launch has not joined it."""
        return self._numbers.get(launch)

    def join(self, run: RunName | None) -> list[Entry]:
        """A process of the run has joined the job. Returns the record, if this is new."""
        if run is None or run.id in self._numbers:
            return []
        self._add(run)
        return [_joined(run.id, run.number)]

    def entries(self) -> list[Entry]:
        return [_joined(*each) for each in self._numbers.items()]

    def restore(self, body: Body) -> None:
        """Applies the record `run_joined`. Raises DamagedRecord."""
        self._add(RunName(body.text("run"), body.number("number", least=1, most=limits.RUN_NUMBER_MAX)))

    def _add(self, run: RunName) -> None:
        self._numbers[run.id] = run.number
        while len(self._numbers) > RUNS_MAX:
            del self._numbers[next(iter(self._numbers))]


def _joined(launch: str, number: int) -> Entry:
    return "run_joined", {"run": launch, "number": number}
