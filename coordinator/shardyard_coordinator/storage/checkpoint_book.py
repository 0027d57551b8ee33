"""When a checkpoint of a job is due, what the newest one holds, and what may be forgotten since.

Owns: the number of the next checkpoint, the one under way, the newest committed one. Invariants: there is one
checkpoint at a time. Numbers only grow, also over restarts, so that no file is written twice. The data ledger is copied
before any partition is cut (rule A9). What `committed` names is on the storage. Must not know: servers, storage, what
time it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardyard.checkpoints.manifest import FileRef, ResidualFile
from shardyard.config.settings import AUTO, NEVER, CheckpointSettings
from shardyard.domain.errors import NotReady, ShardyardError
from shardyard.domain.ids import Incarnation, Token
from shardyard.storage.storage import Written
from shardyard_coordinator.records import (
    Body,
    DamagedRecord,
    Entry,
    checked_items,
    checked_number,
    checked_text,
    require,
)

RETRY_MS: Final = 1_000
_FILE_FIELDS: Final = 4
_WAIVED: Final[Entry] = ("checkpoint_waived", {})
FAILURES_IN_DOUBT: Final = 3
"""Tries in which servers were not ready, after which a checkpoint may never come."""
RETRY_MS_MAX: Final = 60_000
FIRST_MS_MAX: Final = 10_000
"""How long a job without logs waits for its first checkpoint. Longer than a lease: a server that has died is noticed
before, and the job begins again on another."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being taken. `step`: the job's step when it was begun. `data_ledger`: what was closed then.
    Tokens below `floor` belong to leases that had ended. `gone`: workers from which nothing more could come. `sealed`:
    servers whose partitions change no more after their cuts, because others continue from them."""

    number: int
    step: int
    data_ledger: Mapping[str, object]
    floor: Token
    gone: tuple[Incarnation, ...] = ()
    sealed: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that counts. `draft`: the number under which it was begun. The other fields are its draft's."""

    number: int
    step: int
    data_ledger: Mapping[str, object]
    draft: int = 0
    floor: Token = Token(0)
    gone: tuple[Incarnation, ...] = ()
    url: str = ""
    """Where it is, if not where the book's are."""
    created_s: int = 0
    """When its manifest was written, in seconds since 1970: for people."""
    feedback: tuple[ResidualFile, ...] = ()
    """What its workers' error feedback remembered."""
    trusted: str = ""
    """The digest of its manifest, if an operator has ordered to trust it: it needs no signature of the yard then."""


class CheckpointBook:
    """`url`: where the job's checkpoints are; None: it has none."""

    def __init__(self, settings: CheckpointSettings, url: str | None, now_ms: int) -> None:
        self._settings = settings
        self.url = url
        self._number = 0
        self._begun_ms = now_ms
        self._begun_step = 0
        self._retry_at_ms = 0
        self._failures = 0
        self._wanted = False
        self._failed: tuple[int, ShardyardError] | None = None
        self._abandoned: set[int] = set()
        self._first_ms: int | None = None
        """Since when the first checkpoint is being written."""
        self.waived = False
        """Whether the job has begun without a first checkpoint."""
        self.draft: Draft | None = None
        self.committed: Committed | None = None

    @property
    def enabled(self) -> bool:
        return self.url is not None

    @property
    def is_in_doubt(self) -> bool:
        """Whether the next checkpoint may never come: because none is planned, or because the last attempt failed. The
        death of a server makes an attempt fail too, but is reported soon, and is no doubt by itself."""
        passing = self._failed is not None and isinstance(self._failed[1], NotReady)
        return not self.enabled or self._failures >= (FAILURES_IN_DOUBT if passing else 1)

    def waive(self, now_ms: int) -> Entry | None:
        """Lets the job begin without a first checkpoint if the storage refuses it, or if it takes long."""
        refused = self._failed is not None and not isinstance(self._failed[1], NotReady)
        late = self._first_ms is not None and now_ms - self._first_ms >= FIRST_MS_MAX
        if self.committed is not None or self.waived or not (refused or late):
            return None
        self.waived = True
        return _WAIVED

    @property
    def base(self) -> int:
        """The number of the newest committed checkpoint, 0 before the first."""
        return 0 if self.committed is None or self.committed.url else self.committed.number

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint may be under way, including one that no longer counts."""
        return self.draft is not None or bool(self._abandoned)

    def sealed_by(self, number: int) -> frozenset[Incarnation]:
        """The servers that the checkpoint under way with this number seals. Empty if it is not under way."""
        return self.draft.sealed if self.draft is not None and self.draft.number == number else frozenset()

    def go_back(self, committed: Committed) -> Entry:
        """Makes that checkpoint the newest. What was committed after it no longer counts."""
        self._continue_from(replace(committed, url="" if committed.url == self.url else committed.url))
        return self._committed

    def want(self) -> None:
        """Asks for a checkpoint that begins after now."""
        self._wanted = True

    def ask(self) -> int:
        """Asks for a checkpoint that begins after now, without a delay after a failure. The caller asks with the
        returned ticket for the outcome."""
        self._wanted, self._retry_at_ms, self._failures = True, 0, 0
        return self._number + 1

    def outcome(self, ticket: int) -> Committed | ShardyardError | None:
        """The checkpoint that was begun since the ticket was given, or the failure of the latest attempt; None while it
        is under way or due."""
        if self.committed is not None and self.committed.draft >= ticket:
            return self.committed
        if self._failed is not None and self._failed[0] >= ticket and not isinstance(self._failed[1], NotReady):
            return self._failed[1]
        if self.draft is None or self.draft.number < ticket:
            self._wanted = True  # this coordinator may have started after another one gave the ticket
        return None

    def is_due(self, now_ms: int, step: int) -> bool:
        """Whether a checkpoint must be begun now. `step`: the job's step."""
        if not self.enabled or self.draft is not None or now_ms < self._retry_at_ms:
            return False
        settings = self._settings
        in_time = settings.every_s and now_ms - self._begun_ms >= 1_000 * settings.every_s
        in_steps = settings.every_steps and step - self._begun_step >= settings.every_steps
        anything_new = self.committed is None or step != self.committed.step
        return self._wanted or self.committed is None or bool(in_steps or (in_time and anything_new))

    def begin(
        self,
        now_ms: int,
        step: int,
        data_ledger: Mapping[str, object],
        floor: Token,
        gone: tuple[Incarnation, ...] = (),
        sealed: frozenset[Incarnation] = frozenset(),
    ) -> tuple[Draft, Entry]:
        assert self.draft is None
        self._number += 1
        if self.committed is None and self._first_ms is None:
            self._first_ms = now_ms
        self._begun_ms, self._begun_step, self._wanted = now_ms, step, False
        self.draft = Draft(self._number, step, data_ledger, floor, gone, sealed)
        return self.draft, ("checkpoint_begun", {"number": self._number})

    def fail(self, number: int, failure: ShardyardError, now_ms: int) -> bool:
        """The checkpoint was not written. Another one is begun after a delay. False if this one was not under way."""
        self._abandoned.discard(number)
        if self.draft is None or self.draft.number != number:
            return False
        self.draft, self._wanted, self._failed = None, True, (number, failure)
        self._retry_at_ms = now_ms + min(RETRY_MS << min(self._failures, 16), RETRY_MS_MAX)
        self._failures += 1
        return True

    def commit(
        self, number: int, step: int, written_as: int, created_s: int = 0, feedback: tuple[ResidualFile, ...] = ()
    ) -> Entry | None:
        """The manifest of the checkpoint that was begun under this number is written as number `written_as`; the
        numbers differ if other runs of the job's name have left checkpoints. None if it is not under way any more."""
        self._abandoned.discard(number)
        if self.draft is None or self.draft.number != number:
            return None
        draft, self.draft = self.draft, None
        self._failures = 0
        self._number = max(self._number, written_as)
        self.committed = Committed(
            written_as,
            step,
            draft.data_ledger,
            draft.number,
            draft.floor,
            draft.gone,
            created_s=created_s,
            feedback=feedback,
        )
        return self._committed

    def abandon(self) -> None:
        """The checkpoint being written no longer counts, because the job's partitions were restored meanwhile."""
        self._first_ms = None
        if self.draft is not None:
            self._abandoned.add(self.draft.number)
            self.draft, self._wanted = None, True

    def _continue_from(self, committed: Committed) -> None:
        self.committed = committed
        if not committed.url:
            self._number = max(self._number, committed.number)
            self._begun_step = committed.step

    # ---- records

    @property
    def _committed(self) -> Entry:
        assert self.committed is not None
        return "checkpoint_committed", {
            "number": self.committed.number,
            "step": self.committed.step,
            "data_ledger": self.committed.data_ledger,
            "draft": self.committed.draft,
            "floor": self.committed.floor,
            "url": self.committed.url,
            "created_s": self.committed.created_s,
            "gone": list(self.committed.gone),
            "feedback": feedback_record(self.committed.feedback),
            "trusted": self.committed.trusted,
        }

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        if self.committed is not None:
            found.append(self._committed)
        if self._number > self.base:
            found.append(("checkpoint_begun", {"number": self._number}))
        return [*found, _WAIVED] if self.waived else found

    def restore(self, kind: str, body: Body) -> None:
        """Raises DamagedRecord."""
        if kind == "checkpoint_waived":
            self.waived = True
            return
        number = body.number("number", least=1)
        if kind == "checkpoint_begun":
            require(number > self._number, f"checkpoint {number} is begun after {self._number}")
            self._number = number
        elif kind == "checkpoint_committed":
            self._continue_from(
                Committed(
                    number,
                    body.number("step"),
                    body.values("data_ledger"),
                    body.number("draft", most=number),
                    Token(body.number("floor")),
                    url=body.text("url"),
                    created_s=body.number("created_s"),
                    gone=tuple(Incarnation(each) for each in body.numbers("gone")),
                    feedback=feedback_of(body),
                    trusted=body.text("trusted"),
                )
            )
        else:
            raise DamagedRecord("its kind is unknown to this release")


def url_of(settings: CheckpointSettings, default: str | None) -> str | None:
    """Where a job's checkpoints are. `default`: for jobs that leave it to the coordinator."""
    if settings.url == NEVER:
        return None
    return default if settings.url == AUTO else settings.url


def feedback_record(files: Sequence[ResidualFile]) -> list[list[object]]:
    return [[each.worker, each.file.path, each.file.written.nbytes, each.file.written.sha256] for each in files]


def feedback_of(body: Body) -> tuple[ResidualFile, ...]:
    """The `feedback` of a record made with `feedback_record`. Raises DamagedRecord."""
    found = []
    for each in body.items("feedback"):
        worker, path, nbytes, sha256 = checked_items(each, "a worker's file", count=_FILE_FIELDS)
        written = Written(checked_number(nbytes, "a file's length"), checked_text(sha256, "a file's digest"))
        file = FileRef(checked_text(path, "a file's path"), written)
        found.append(ResidualFile(checked_text(worker, "a file's worker"), file))
    return tuple(found)
