"""What a job has on the storage, and its way back to it.

Owns: the order of a job's checkpoints and recoveries: when one is begun, and what it does to map and books when it
ends. Invariants: the data ledger is copied before any partition is cut (rule A9); single partitions go back to the
newest committed checkpoint only (rule A8); work that a recovery takes back is open again (rule A11); no checkpoint is
begun while partitions are lost. Must not know: workers, how a job's life goes on or ends, servers' calls, the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace

from shardyard.config.settings import JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import Durability, UpdateMode
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId, Token
from shardyard.domain.layout.layouts import PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataShardSource
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.core.effects import (
    Base,
    Effect,
    ForgetSources,
    LogMessage,
    RestorePartitions,
    TakeCheckpoint,
    records_of,
)
from shardyard_coordinator.core.events import CheckpointTaken
from shardyard_coordinator.flows.deployment import RESTORED_LATER, Deployment, Stage, check_registration
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, Entry, require
from shardyard_coordinator.storage.checkpoint_book import CheckpointBook, Committed, Draft, Subject, url_of
from shardyard_coordinator.storage.log_owners import LogOwner, LogOwners
from shardyard_coordinator.storage.recovery import Attempt, Recovery, Restored
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work import data_ledger, step_ledger
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.step_ledger import StepLedger
from shardyard_coordinator.work.tokens import Tokens


class CheckpointManager:
    """Of one job, whose parts it is given. `default_url`: where its checkpoints are if it leaves that to the
    coordinator."""

    def __init__(
        self,
        job: JobId,
        settings: JobSettings,
        *,
        deployment: Deployment,
        feeds: DataLedger | StepLedger,
        tokens: Tokens,
        default_url: str | None,
        now_ms: int,
    ) -> None:
        self._job = job
        self._settings = settings
        self._switches = 0
        self._deployment = deployment
        self._feeds = feeds
        self._tokens = tokens
        self.book = CheckpointBook(settings.checkpoint, url_of(settings.checkpoint, default_url), now_ms)
        self.recovery = Recovery()
        self.restored: Restored | None = None
        """What the latest recovery brought back."""
        self.origin: RestorePoint | None = None
        """With what the job is to begin; None once it has, or if it begins with first values. One with logs has begun
        when a checkpoint of its own is there: until then it can only begin again."""
        self.trails = LogOwners(settings.checkpoint.keep) if settings.durability is Durability.WAL else None

    def go_by(self, settings: JobSettings, switches: int) -> None:
        """As of the job's switch of that number."""
        self._settings, self._switches = settings, switches

    def tick(
        self,
        now_ms: int,
        step: int,
        servers: Sequence[Server],
        gone: tuple[Incarnation, ...],
        workers: Set[Incarnation] = frozenset(),
        *,
        holds: bool = False,
    ) -> list[Effect]:
        """`step`: where the job stands; `servers`, `workers`: the living; `gone`: workers of which nothing can come any
        more; `holds`: no checkpoint is begun now."""
        if self.origin is not None and self._deployment.stage is Stage.EMPTY and servers:
            return self._begin_with(self.origin, servers, now_ms)
        if self.recovery.needed:
            return self._recover(servers, workers, now_ms)
        return [] if holds else self._begin_checkpoint(now_ms, step, gone)

    # ---- beginning with a checkpoint, or going back to one that was chosen

    def begin_with(self, origin: RestorePoint) -> list[Entry]:
        """A run that goes on from what another one has left. Raises DamagedRecord."""
        self.origin = origin
        if isinstance(self._feeds, StepLedger):
            self._feeds.begin_with(origin.data_ledger, origin.step)
        else:
            self._feeds.begin_with(origin.data_ledger)
        self._tokens.seen(origin.token)
        begun: Entry = ("job_resumed", {})
        given: Entry = ("token_given", {"token": self._tokens.latest})
        return [begun, *self._feeds.entries(), self.book.go_back(_committed(origin)), given]

    def check_fits(
        self, variables: Sequence[VariableSpec], optimizer: OptimizerSpec, tables: Sequence[TableSettings] = ()
    ) -> None:
        """Raises VariableConflict where they are not those of the checkpoint with which the job is to begin, and
        NotReady, for as long as its partitions are not there."""
        assert self.origin is not None
        whose = f"{self.origin}, with which it is to begin,"
        check_registration(self.origin.layout, variables, optimizer, tables, whose)
        if self._deployment.stage is not Stage.OPEN or self.recovery.needed:
            raise errors.NotReady(
                f"{self._title} begins with {self.origin}: its partitions are being restored",
                why=self.recovery.waits_for or "that takes a moment",
            )

    def _begin_with(self, origin: RestorePoint, servers: Sequence[Server], now_ms: int) -> list[Effect]:
        self._deployment.place_as(origin.layout, servers)
        lost = self.recovery.lose([part.partition for part in origin.layout.partitions], now_ms)
        told = f"{self._title} begins with {origin}, in {origin.url}"
        return [*self._records(self._deployment.registered, RESTORED_LATER, lost), LogMessage(told)]

    def go_back(self, origin: RestorePoint, now_ms: int, *, is_of_before: bool = False) -> list[Effect]:
        """The whole job, while it runs (rule A8). `is_of_before`: the checkpoint is one of partitions that the job has
        left. Raises InvalidRequest where its scripts could not go along, NotReady while something else is written or
        restored."""
        deployed, todo = (
            self._deployment,
            "end its scripts, order it again, and start them: the next run begins with it",
        )
        assert deployed.layout is not None
        if self.trails is not None:
            raise errors.InvalidRequest(f"{self._title} keeps logs, and goes back by none of them", todo=todo)
        if origin.mode is not self._settings.consistency.mode.updates or (is_of_before and origin.job == self._job):
            raise errors.InvalidRequest(
                f"{self._title} is {self._settings.consistency.mode.value}, and {origin} is {origin.mode.value}"
                + (", of before it was switched" if origin.mode is self._settings.consistency.mode.updates else ""),
                why="the job was switched since",
                todo=todo,
            )
        if origin.job != self._job or origin.layout != deployed.layout:
            raise errors.InvalidRequest(f"{origin} is of another run than {self._title}", why="", todo=todo)
        finished = self._feeds.loses_finished(origin.data_ledger)
        if finished is not None:
            raise errors.InvalidRequest(
                f"{self._title} has gone through data set {finished}, which {origin} has in part",
                why="a script does not go back to a loop that it has left",
                todo=todo,
            )
        if self.recovery.needed or self.book.is_writing:
            raise errors.NotReady(f"{self._title} is written down, or restored, at this moment")
        self.book.want()  # what it goes back from must not stay the newest
        record = self.book.go_back(_committed(origin))
        lost = self.recovery.lose([part.partition for part in deployed.layout.partitions], now_ms)
        return [
            *self._records(record, lost),
            LogMessage(f"{self._title} goes back to {origin}, as it was told", warning=True),
        ]

    def go_over(
        self, feeds: DataLedger | StepLedger, begun: Sequence[tuple[DataShardSource, int]], step: int, now_ms: int
    ) -> list[Entry]:
        """The job goes on from its newest checkpoint, which has all of it, in another mode: its partitions are
        restored in that, and nothing is computed again. `feeds`: by which data is dealt from now on; `begun`: data
        shards of which the checkpoint has batches as steps; `step`: the first, of a job that had none; else 0."""
        assert self.book.committed is not None
        assert self._deployment.layout is not None
        self.deal(feeds)
        entries = [[kind, body] for kind, body in feeds.copied]
        listed = [[source.feed, source.epoch, source.index, batch] for source, batch in begun]
        ledger = {"entries": entries, "closed": feeds.closed, "token": self._tokens.latest, "begun": listed}
        self.book.want()  # the newest is of the mode before
        taken = self.book.committed
        if step:
            ledger, taken = {**ledger, "step": step}, replace(taken, step=step)
        committed = self.book.go_back(replace(taken, data_ledger=ledger))
        return [committed, self.recovery.lose([part.partition for part in self._deployment.layout.partitions], now_ms)]

    def deal(self, feeds: DataLedger | StepLedger) -> None:
        """The job's data is dealt by these from now on."""
        self._feeds = feeds

    def begin(self, servers: Sequence[Server]) -> list[Entry]:
        """The variables have their partitions, on these servers among others."""
        assert self._deployment.map is not None
        if self.trails is None:
            return []
        logs = {server.incarnation: server.logs for server in servers}
        owners = self._deployment.map.owners
        return [self.trails.begin({each.partition: LogOwner(each.server, 0, logs[each.server]) for each in owners})]

    @property
    def can_begin(self) -> bool:
        """Whether work may be acknowledged: with logs there must be a checkpoint of the job's own that they follow."""
        return self.trails is None or (self.book.committed is not None and self.origin is None)

    # ---- recovery

    def lost_with(self, server: Server) -> list[PartitionOwner]:
        """The partitions that a server that is gone had, or was to have."""
        maps = [self._deployment.map, None if self.recovery.attempt is None else self.recovery.attempt.map]
        found = {
            owner.partition: owner for each in maps if each for owner in each.by_server().get(server.incarnation, ())
        }
        return [found[partition] for partition in sorted(found)]

    @property
    def can_go_back(self) -> bool:
        return self._deployment.stage in (Stage.OPEN, Stage.RESTORING) and self.book.committed is not None

    @property
    def can_begin_again(self) -> bool:
        """Whether nothing was built on first values yet, so that they may be given again."""
        return not self.can_begin and self.book.committed is None and self._deployment.stage is not Stage.EMPTY

    def lose(self, lost: Sequence[PartitionOwner], server: Server, how: str, now_ms: int) -> list[Effect]:
        """Partitions are gone with their server, where there is a checkpoint to go back to."""
        committed = self.book.committed
        assert committed is not None
        self.book.abandon()
        record = self.recovery.lose([owner.partition for owner in lost], now_ms)
        what = "the job goes back to" if self._is_whole else "its partitions go back to"
        if self.trails is not None and self.origin is None:
            what = "its log is read from"
        told = f"{self._title}: server {server.incarnation} {how}; {what} checkpoint {committed.number}"
        return [*self._records(record), LogMessage(f"{told} of step {committed.step:,}", warning=True)]

    def lose_values(self, lost: Sequence[PartitionOwner], server: Server, how: str, now_ms: int) -> list[Effect]:
        """The same before there is any, where `can_begin_again`."""
        self.book.abandon()
        record = self.recovery.lose([owner.partition for owner in lost], now_ms)
        self._deployment.lose_values()
        told = f"{self._title}: server {server.incarnation} {how} before the first checkpoint"
        return [*self._records(record), LogMessage(f"{told}; first values are given again", warning=True)]

    def goes_back_with(self, generation: Generation) -> Committed | None:
        """The checkpoint to which all partitions go back with the attempt of that generation, and its URL; None where
        some do not, or where logs have what came after it."""
        attempt, layout = self.recovery.attempt, self._deployment.layout
        if attempt is None or attempt.map.generation != generation or layout is None:
            return None
        if len(attempt.partitions) < len(layout.partitions) or (self.trails is not None and self.origin is None):
            return None
        committed, url = self.book.committed, self.book.url
        assert committed is not None
        return replace(committed, url=committed.url or url or "")

    def end_recovery(self, generation: Generation, now_ms: int) -> list[Effect]:
        """All partitions have servers again: the map is the job's."""
        attempt = self.recovery.end(generation, now_ms, restored=True)
        if attempt is None:
            return []
        committed = self.book.committed
        assert committed is not None
        partitions = ", ".join(map(str, sorted(attempt.partitions)[:8]))
        told = f"{self._title}: partitions {partitions} are restored"
        logs = self.trails is not None and self.origin is None
        reopened = [[each.feed, each.epoch, each.index] for each in self._go_over(attempt.map)]
        self.restored = Restored(
            committed.number, committed.step, committed.created_s, len(attempt.partitions), len(reopened), logs
        )
        if self.trails is None or self.origin is not None:
            if self.origin is not None:
                self.book.want()
            begun = [] if self.trails is None else [self._begin_logs(attempt)]
            self._end_beginning(has_checkpoint=False)
            kind, body = self._deployment.moved
            taken_back = {"partitions": sorted(attempt.partitions), "checkpoint": committed.number}
            return [
                *self._records((kind, {**body, **taken_back, "leased_again": reopened}), *begun),
                LogMessage(f"{told}, of step {committed.step:,}"),
            ]
        since = committed.number
        self.book.want()  # so that the next one to read has little to read
        moved = self.trails.move(
            {
                owner.partition: LogOwner(owner.server, since, attempt.logs[owner.server])
                for owner in attempt.map.owners
                if owner.partition in attempt.partitions
            }
        )
        return [*self._records(self._deployment.moved, moved), LogMessage(f"{told}, with all that was acknowledged")]

    def fail_recovery(self, generation: Generation, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        """Another attempt follows. Raises the failure where none can succeed."""
        current = self.recovery.attempt
        if current is None or current.map.generation != generation:
            return []
        self.recovery.end(generation, now_ms, restored=False)
        if isinstance(failure, errors.CheckpointDamaged | errors.CheckpointNotFound | errors.LogDamaged):
            raise failure
        return [LogMessage(f"{self._title}: its partitions are not restored yet: {failure.what}", warning=True)]

    def _recover(self, servers: Sequence[Server], workers: Set[Incarnation], now_ms: int) -> list[Effect]:
        """Begins to restore lost partitions, where there is a server for them."""
        deployed = self._deployment
        assert deployed.layout is not None
        assert deployed.map is not None
        sizes = [part.payload_bytes for part in deployed.layout.partitions]
        if self.book.committed is None:
            return self._place_again(deployed.map, sizes, servers, now_ms)
        url = self.book.committed.url or self.book.url
        assert url is not None
        number = self.book.committed.number
        folders = None
        if self.trails is not None and self.origin is None:
            folders = {partition: self.trails.folder(partition, number) for partition in self.recovery.lost}
        started = self.recovery.begin(
            deployed.map, sizes, servers, whole=self._is_whole, now_ms=now_ms, folders=folders
        )
        if started is None:
            return []
        attempt, record = started
        bases = self._bases(attempt.partitions)
        working = tuple(sorted(self._feeds.working & workers)) if isinstance(self._feeds, DataLedger) else ()
        begun = data_ledger.begun_in(self.book.committed.data_ledger)
        step = step_ledger.stood_in(self.book.committed.data_ledger)
        restore = RestorePartitions(
            self._subject, attempt.map, url, bases, attempt.life, attempt.partitions, working, begun, step
        )
        return [*self._records(record), restore]

    def _place_again(
        self, map_: PartitionMap, sizes: Sequence[int], servers: Sequence[Server], now_ms: int
    ) -> list[Effect]:
        """Lost partitions have servers again; all begin anew, with first values."""
        begun = self.recovery.begin(map_, sizes, servers, whole=True, now_ms=now_ms)
        if begun is None:
            return []
        attempt, record = begun
        self.recovery.end(attempt.map.generation, now_ms, restored=True)
        self._deployment.place_again(attempt.map)
        return [*self._records(record, self._deployment.placed_again, self._begin_logs(attempt))]

    def _bases(self, partitions: Collection[PartitionId]) -> tuple[Base, ...]:
        """The newest checkpoint; with logs, older ones too."""
        assert self.book.committed is not None
        trails = self.trails
        if trails is None or self.origin is not None:
            return (Base(self.book.committed.number),)
        return tuple(
            Base(number, {partition: trails.of(partition, number) for partition in sorted(partitions)})
            for number in reversed(trails.kept)
        )

    def _go_over(self, map_: PartitionMap) -> list[DataShardSource]:
        """To a new map. Without logs restored partitions have what the newest checkpoint has: work that was closed
        since is open again (rule A11), and given."""
        assert self.book.committed is not None
        self._deployment.map = map_
        if self._deployment.stage is Stage.RESTORING:
            self._deployment.restored()
            return []
        return [] if self.trails is not None else self._feeds.reopen(self.book.committed.data_ledger)

    def _begin_logs(self, attempt: Attempt) -> Entry:
        assert self.trails is not None
        owners = attempt.map.owners
        return self.trails.begin(
            {each.partition: LogOwner(each.server, 0, attempt.logs[each.server]) for each in owners}
        )

    # ---- checkpoints

    def end_checkpoint(self, taken: CheckpointTaken) -> list[Effect]:
        record = self.book.commit(taken.draft, taken.step, taken.number, taken.created_s, taken.feedback)
        if record is None:
            return []
        if self.trails is not None:
            self.trails.commit(taken.number)
        self._end_beginning(has_checkpoint=True)
        self._forget_made_up()
        told = LogMessage(f"{self._title}: checkpoint {taken.number} of step {taken.step:,}")
        return [*self._records(record), told, *self._forget()]

    def _end_beginning(self, *, has_checkpoint: bool) -> None:
        """The partitions are there; `has_checkpoint`: so is a checkpoint of the job's own."""
        if self.trails is None or has_checkpoint:
            self.origin = None

    def _forget(self) -> list[Effect]:
        """What the newest checkpoint has, and nobody may push any more (rule A7). What was closed in one checkpoint is
        closed in the next, so servers that were not reached need not be asked again."""
        committed, map_ = self.book.committed, self._deployment.map
        assert committed is not None
        assert map_ is not None
        if not self._forgets:
            return []
        done = data_ledger.done_in(committed.data_ledger)
        return [ForgetSources(self._job, map_, done, committed.gone, committed.floor)]

    def _forget_made_up(self) -> None:
        """What no partition can stand at again: it goes back to the newest checkpoint at most, or, on command, to one
        that has closed the same feeds."""
        if isinstance(self._feeds, StepLedger):
            assert self.book.committed is not None
            self._feeds.forget_made_up(self.book.committed.data_ledger)

    @property
    def _forgets(self) -> bool:
        """The ranks of a synchronous job are few, and their tokens live as long as it."""
        return isinstance(self._feeds, DataLedger)

    def fail_checkpoint(self, draft: int, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        if not self.book.fail(draft, failure, now_ms):
            return []
        return [LogMessage(f"{self._title}: checkpoint {draft} was not taken: {failure.what}", warning=True)]

    def is_whole_at(self, step: int) -> bool:
        """Whether a checkpoint of a job that stands at `step`, and goes no further, would say nothing new; so for one
        that is not written down."""
        if not self.book.enabled or self._deployment.stage is not Stage.OPEN:
            return True
        committed = self.book.committed
        return committed is not None and self.can_begin and not self.recovery.needed and self._is_of(committed, step)

    def ask_for_the_last(self, step: int) -> int:
        """A ticket for a checkpoint of a job that stands at `step`, and goes no further: the one under way, if it was
        begun there."""
        draft = self.book.draft
        return draft.number if draft is not None and self._is_of(draft, step) else self.book.ask()

    def _is_of(self, taken: Draft | Committed, step: int) -> bool:
        return taken.step == step and taken.data_ledger.get("closed") == self._feeds.closed

    def note_log(self, nbytes: int) -> None:
        """A server's log has grown to so many bytes since the last checkpoint was begun."""
        most = self._settings.checkpoint.every_log_bytes
        if self.trails is not None and most and nbytes >= most and self.book.draft is None:
            self.book.want()

    @property
    def has_all_data(self) -> bool:
        """Whether the newest checkpoint has all data that is closed. A job whose first one does not come could not go
        back to it; one with logs does not go back."""
        if self.trails is not None:
            return True
        if self.book.committed is None:
            draft = self.book.draft
            return self.book.is_in_doubt and (draft is None or draft.data_ledger.get("closed") == self._feeds.closed)
        return self.book.committed.data_ledger.get("closed") == self._feeds.closed

    def has_all_steps_of(self, feed: int) -> bool:
        """As `has_steps_before`, of a feed."""
        return not isinstance(self._feeds, StepLedger) or self.has_steps_before(self._feeds.end(feed))

    def has_steps_before(self, end: int) -> bool:
        """Whether the newest checkpoint of a synchronous job has all steps before `end`, the last of which is done;
        another one is wanted else."""
        if self.trails is not None:
            return True
        committed, draft = self.book.committed, self.book.draft
        if committed is None and self.book.is_in_doubt and (draft is None or draft.step >= end):
            return True
        if committed is not None and committed.step >= end:
            return True
        self.book.want()
        return False

    def _begin_checkpoint(self, now_ms: int, step: int, gone: tuple[Incarnation, ...]) -> list[Effect]:
        deployed = self._deployment
        if not self.can_begin:
            self.book.want()
        if deployed.stage is not Stage.OPEN or not self.book.is_due(now_ms, step):
            return []
        assert deployed.layout is not None
        assert deployed.map is not None
        assert self.book.url is not None
        # before any partition is cut (rule A9)
        entries = [[kind, body] for kind, body in self._feeds.copied]
        ledger = {"entries": entries, "closed": self._feeds.closed, "token": self._tokens.latest}
        # lower tokens are of leases that have ended; those to come are higher
        floor = Token(min(self._feeds.tokens, default=self._tokens.latest + 1)) if self._forgets else Token(0)
        draft, record = self.book.begin(now_ms, step, ledger, floor, gone)
        keep, base = self._settings.checkpoint.keep, self.book.base
        return [
            *self._records(record),
            TakeCheckpoint(
                self._subject,
                deployed.map,
                draft,
                self.book.url,
                base,
                keep,
                0 if self.trails is None else self.trails.oldest,
                frozenset() if self.trails is None else self.trails.needed,
                self._deployment.workers if self.keeps_feedback else (),
            ),
        ]

    @property
    def keeps_feedback(self) -> bool:
        """Whether workers of the job remember what they have not sent."""
        layout = self._deployment.layout
        return layout is not None and self._settings.compression.push_rules.keep_feedback(layout.variables)

    @property
    def _subject(self) -> Subject:
        settings = self._settings
        assert self._deployment.layout is not None
        return Subject(
            job=self._job,
            name=settings.name,
            seed=settings.seed,
            settings=settings.model_dump(mode="json"),
            mode=settings.consistency.mode.updates,
            logical_ranks=settings.logical_rank_count,
            durability=settings.durability,
            layout=self._deployment.layout,
            staleness=settings.consistency.bound,
            stale=settings.consistency.stale,
            clipping=settings.server_clipping,
            backup_workers=settings.consistency.backup_workers,
            switches=self._switches,
            rows_at_once=settings.consistency.rows_at_once,
        )

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that make this anew, after those of the deployment and the feeds."""
        return [
            *([("job_resumed", {})] if self.origin is not None else []),
            *self.book.entries(),
            *([] if self.trails is None else self.trails.entries()),
            *self.recovery.entries(),
        ]

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Takes a record of `entries`, or of a map that was not the first. Raises DamagedRecord."""
        match kind:
            case "checkpoint_begun" | "checkpoint_committed":
                self.book.restore(kind, body)
                # one that was not begun here is of another run
                if kind == "checkpoint_committed" and body.number("draft"):
                    if self.trails is not None:
                        self.trails.commit(body.number("number"))
                    self._end_beginning(has_checkpoint=True)
                    self._forget_made_up()
            case "logs_begun":
                require(self.trails is not None, "logs of a job that has none")
                assert self.trails is not None
                self.trails.restore(body)
            case "partitions_moved":
                require(self.book.committed is not None, "partitions are restored without a checkpoint")
                self._deployment.restore(kind, body)
                assert self._deployment.map is not None
                self.recovery.restored()
                self._end_beginning(has_checkpoint=False)
                self._go_over(self._deployment.map)
            case "partitions_placed_again":
                self._deployment.restore(kind, body)
                self.recovery.restored()
            case _:
                self.recovery.restore(kind, body, now_ms)
                if self.recovery.needed and self.can_begin_again:
                    self._deployment.lose_values()

    # ---- within

    @property
    def _is_whole(self) -> bool:
        """A synchronous job goes back as a whole, unless logs bring back its step; and any that begins."""
        sync = self._settings.consistency.mode.updates is UpdateMode.SYNC
        return (sync and self.trails is None) or self.origin is not None

    @property
    def _title(self) -> str:
        return title_of(self._settings, self._job)

    def _records(self, *entries: Entry) -> list[Effect]:
        return [*records_of(self._job, entries)]


def _committed(origin: RestorePoint) -> Committed:
    return Committed(
        origin.number,
        origin.step,
        origin.data_ledger,
        floor=origin.floor,
        url=origin.url,
        created_s=origin.created_s,
        feedback=origin.feedback,
    )


def title_of(settings: JobSettings, job: JobId) -> str:
    """How messages name a job."""
    return f"job {settings.name!r} ({job})"
