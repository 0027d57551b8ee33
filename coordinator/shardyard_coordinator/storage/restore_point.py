"""The checkpoint of an ordered restore: a job begins with it, or goes back to it.

Owns: what the machine must know from the manifest, its form as a record, and which settings a run needs to continue
from it. Invariant: a restore point holds all that is decided from it, so that no storage is read when a run begins.
Must not know: storage, who ordered it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.checkpoints import layout as layouts
from shardyard.checkpoints.manifest import ResidualFile
from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.ids import JobId, Token
from shardyard.domain.layout.layouts import JobLayout
from shardyard_coordinator.placement import layout_records
from shardyard_coordinator.records import Body, Entry, require
from shardyard_coordinator.storage.checkpoint_book import feedback_of, feedback_record


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Checkpoint `number` of the jobs named `name`, below `url`; `job` wrote it. `token`: the highest in its ledgers.
    `floor`: as in its manifest. `created_s`: when it was written, in seconds since 1970. `trusted`: the digest of its
    manifest, if it needs no signature of the yard. `owner`: whose jobs may begin with it; empty: all of that name."""

    name: str
    url: str
    number: int
    job: JobId
    step: int
    mode: UpdateMode
    logical_ranks: int
    seed: int
    layout: JobLayout
    data_ledger: Mapping[str, object]
    token: Token
    floor: Token
    created_s: int
    feedback: tuple[ResidualFile, ...] = ()
    trusted: str = ""
    owner: str = ""

    def __str__(self) -> str:
        return f"checkpoint {self.number} of step {self.step:,}"

    def agree(self, settings: JobSettings) -> JobSettings:
        """The settings with which a run can continue from here: seed and logical ranks are the checkpoint's. Raises
        ConfigurationError if the given settings contradict them."""
        consistency = settings.consistency
        if consistency.mode.updates is not self.mode:
            raise ConfigurationError(
                f"job {self.name!r} is to begin with {self}, which is {self.mode.value}; job.consistency.mode is "
                f"{consistency.mode.value}",
                why="an update means something else in the other mode",
                todo=f"set job.consistency.mode={self.mode.value}, or cancel: shardyard checkpoint restore --cancel",
            )
        if self.mode is UpdateMode.SYNC:
            if consistency.logical_ranks not in ("auto", self.logical_ranks):
                raise ConfigurationError(
                    f"job {self.name!r} is to begin with {self}, which has {self.logical_ranks} logical ranks; "
                    f"job.consistency.logical_ranks is {consistency.logical_ranks}",
                    why="the ranks say which samples belong to a step",
                    todo=f"set job.consistency.logical_ranks={self.logical_ranks}, or leave it at auto",
                )
            if consistency.backup_workers >= self.logical_ranks:
                raise ConfigurationError(
                    f"job {self.name!r} is to begin with {self}, which has {self.logical_ranks} logical ranks; "
                    f"job.consistency.backup_workers is {consistency.backup_workers}",
                    why="at least one rank must count",
                    todo=f"set job.consistency.backup_workers below {self.logical_ranks}",
                )
            if not consistency.backup_workers and self._makes_up:
                raise ConfigurationError(
                    f"job {self.name!r} is to begin with {self}, of a run with backup workers; "
                    "job.consistency.backup_workers is 0",
                    why="samples that came late there must be computed again",
                    todo="set job.consistency.backup_workers to 1 or more",
                )
            consistency = consistency.model_copy(update={"logical_ranks": self.logical_ranks})
        return settings.model_copy(update={"seed": self.seed, "consistency": consistency})

    @property
    def _makes_up(self) -> bool:
        """Whether the checkpoint is from a run with backup workers."""
        entries = self.data_ledger.get("entries", ())
        assert isinstance(entries, list | tuple)
        return any(kind == "steps_decided" for kind, _ in entries)

    @property
    def entry(self) -> Entry:
        return "restore_ordered", {
            "name": self.name,
            "url": self.url,
            "number": self.number,
            "of": self.job,
            "step": self.step,
            "mode": self.mode.value,
            "logical_ranks": self.logical_ranks,
            "seed": self.seed,
            "layout": layouts.to_document(self.layout),
            "data_ledger": self.data_ledger,
            "token": self.token,
            "floor": self.floor,
            "created_s": self.created_s,
            "feedback": feedback_record(self.feedback),
            "trusted": self.trusted,
            "owner": self.owner,
        }


def of_record(body: Body) -> RestorePoint:
    """Raises DamagedRecord."""
    modes = {mode.value: mode for mode in UpdateMode}
    require(body.text("mode") in modes, f"mode {body.text('mode')!r}")
    return RestorePoint(
        body.text("name"),
        body.text("url"),
        body.number("number", least=1),
        JobId(body.number("of")),
        body.number("step"),
        modes[body.text("mode")],
        body.number("logical_ranks"),
        body.number("seed"),
        layout_records.layout_of_record(body),
        body.values("data_ledger"),
        Token(body.number("token")),
        Token(body.number("floor")),
        body.number("created_s"),
        feedback_of(body),
        body.text("trusted"),
        body.text("owner"),
    )
