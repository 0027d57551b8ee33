"""How a worker's work becomes pushes with names, and which version it computes on.

A strategy answers three questions: what is the next push called, which version must the model hold meanwhile, and when
is a step over. Asynchronous: any version, over at once. Synchronous: exactly version t for step t, over when all
logical ranks have contributed, or when this worker has another rank of the step to compute (docs/ledger.md, rules B1
to B5).

Invariant: when `contribute` returns, the targets hold the version that the next gradient is to be computed on, or will
when they are used (Prefetch). Must not know: datasets, optimizers.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Rank, Token
from shardyard.domain.push_names import PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome
from shardyard_worker.consistency.decisions import Decisions
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec, PushRequest
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


R = TypeVar("R")

STOP_SLICE_MS = 20
"""Between two questions where the job stops, which is a matter of a heartbeat of each worker."""
NEWEST = PullSpec(0, exactly=False, prefetched=True)


class LostWork(Exception):
    """The lease of this work has gone to another worker, or stands elsewhere. The model holds a current version."""


class ModeChanged(LostWork):
    """The job has gone over to updates of another kind: work of logical ranks that was not counted as a step is leased
    as data shards, and the rest of data shards is that of steps. The targets stay as they are until another strategy
    begins."""


class Strategy(ABC):
    """One worker's way through a job. Used by one thread."""

    def __init__(self, training: Trainer) -> None:
        self._training = training
        self._session = training.session

    @property
    @abstractmethod
    def step(self) -> int:
        """The job's step: updates applied, as far as this worker has seen."""

    @abstractmethod
    def begin(self) -> None:
        """Brings the targets to a version to compute on, if this worker has anything to compute."""

    @abstractmethod
    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        """Pushes work under its name, or under one of this worker's own; `sending` None: it shall not count.
        `upcoming`: rows that come along with the values.

        Raises LostWork where another worker has taken it over.
        """

    @abstractmethod
    def resume(self) -> None:
        """This worker has work; the targets hold a version to compute it on."""

    @abstractmethod
    def rest(self) -> None:
        """This worker has no work, for now or for good."""

    @abstractmethod
    def drain(self) -> None:
        """Waits for what is under way. Raises LostWork where it belongs to another worker."""

    @abstractmethod
    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        """Before this worker leaves in good order: what is under way is waited for, and what compression has not sent
        yet is sent under these settings, or lost. Raises LostWork."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads. Nothing is contributed from now on."""

    # ---- the step at hand (training.trainer, StepContext)

    @abstractmethod
    def reload(self) -> None: ...

    @abstractmethod
    def follow_map(self) -> None: ...

    def rows_version(self) -> int | None:
        return None

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        raise error

    def _note(self, answer: ExchangeResult, sending: StepInput | None) -> None:
        fresh = [result for result in answer.results if result.outcome is not Outcome.DUPLICATE]
        if sending is not None and sending.coded and fresh:
            self._session.progress.samples += round(sending.weight)
        self._session.reached(self.step)


@dataclass(frozen=True)
class _Flight:
    """A push under way in a thread of its own."""

    name: PushName
    sending: StepInput | None
    shipment: PushRequest
    answer: Future[ExchangeResult]


class AsyncStrategy(Strategy):
    """Each push is applied as it comes; the next gradient is computed on what the servers have then.

    With a window, `contribute` returns while its push is under way: the next gradient is computed on what the push
    before brought back, and what became of a push is known when the next one is contributed, or at `drain`.
    """

    def __init__(self, training: Trainer) -> None:
        super().__init__(training)
        self._step = 0
        self._flight: _Flight | None = None
        self._pool = ThreadPoolExecutor(1, "flight") if self._session.settings.worker.window else None
        self._pushes = 0
        self._wish = NEWEST
        """What is asked for with the push under way."""
        self._uncertain: PushName | None = None
        self._moved = False

    @property
    def step(self) -> int:
        return self._step

    def begin(self) -> None:
        with contextlib.suppress(LostWork):  # told where the work was given up; here only its end matters
            self.drain()
        self._take_newest()

    @property
    def is_to_go_over(self) -> bool:
        """Whether the job has gone over to steps; its partitions may be on their way."""
        return self._session.consistency.mode.updates is UpdateMode.SYNC

    def has_gone_over(self) -> bool:
        """Whether there are steps now, whose map is followed from then on. For where nothing is under way."""
        if self.is_to_go_over and self._training.is_behind:
            self._training.follow_map()
        return self._session.mode is UpdateMode.SYNC

    def _own_name(self) -> PushName:
        """Of this worker's next push without leased data, which it begins. Raises ModeChanged where there are steps."""
        if self._uncertain is not None:
            raise errors.InvalidRequest(
                f"a push after {self._uncertain}, of which nobody knows whether all servers have it",
                why="another gradient under the same name would be applied by some servers and skipped by others",
                todo="let the error of that push end the script, and start it again",
            )
        if self.is_to_go_over or not self._session.brake.begin_own():
            self.drain()
            self._await_halt()
        source = SourceKey(WorkerSource(self._session.caller.incarnation))
        return PushName(source, Token(0), self._pushes, self._pushes)

    def _await_halt(self) -> None:
        brake = self._session.brake
        with self._session.wait_registry.over(lambda: "the job to go over to steps, or to stay as it is"):
            while True:
                if self.has_gone_over():
                    log.warning("a step outside of job.batches does not count: the job has gone over to steps")
                    raise ModeChanged
                if not self.is_to_go_over and brake.begin_own():
                    return
                self._session.refresh()
                self._training.router.pause(SLICE_MS)

    def resume(self) -> None:
        """Any version will do."""

    def rest(self) -> None:
        """Nobody waits for this worker."""

    def _take_newest(self) -> None:
        router = self._training.router
        self._step = self._newest().version_max
        self._moved = self._moved or router is not self._training.router
        self._session.reached(self._step)

    def _newest(self) -> ExchangeResult:
        """Puts the newest values into the targets."""
        return self._training.pull_newest()

    def reload(self) -> None:
        flight = self._flight
        if flight is not None:
            with self._session.wait_registry.over(lambda: f"push {flight.name} to be answered"):
                wait([flight.answer])  # the router is for one thread at a time
        self._take_newest()

    def follow_map(self) -> None:
        flight = self._flight
        if flight is not None:
            with self._session.wait_registry.over(lambda: f"push {flight.name} to be answered"):
                wait([flight.answer])  # the router is for one thread at a time
        self._training.follow_map()
        self._moved = True

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        name = name or self._own_name()
        self._training.values.complete()
        self._open_again(name)
        sending = self._judge(name, sending)
        if self._training.pushes.feedback is not None:
            self.drain()  # one push can be undone, so there is one at a time
        shipment = self._training.pushes.build(name, sending, upcoming)
        if self._pool is None:
            self._wish = self._make_wish()
            self._land(name, sending, partial(self._push, shipment))
            return
        self.drain()
        self._open_again(name)  # landing may have met another map
        self._wish = self._make_wish()
        flight = self._pool.submit(self._training.router.push_pull, shipment, self._wish)
        self._flight = _Flight(name, sending, shipment, flight)
        self._training.pushes.release_gradients()
        if isinstance(name.key.source, WorkerSource):
            self._pushes += 1

    def _judge(self, name: PushName, sending: StepInput | None) -> StepInput | None:
        """None where it shall not count. Raises LostWork."""
        try:
            counts = sending is None or self._training.pushes.may_count(name, sending, self._step)
        except (errors.StaleToken, errors.StraddlingRange) as error:
            log.info("%s does not count: %s", name, error.what)
            self.drain()
            self._take_newest()
            raise LostWork from error
        return sending if counts else None

    def drain(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight.name, flight.sending, partial(self._await_flight, flight))

    def _push(self, shipment: PushRequest, gap: errors.SequenceGap | None = None) -> ExchangeResult:
        """`gap`: what a try before this one met."""
        in_vain = False
        while True:
            if gap is not None:  # out of the reach of the handlers below: a gap that cannot be mended leaves here
                # the answer to a rebase that was carried out may have been lost; the next one has nothing to tell
                in_vain, gap = not self._rebase(shipment.name, gap, in_vain=in_vain), None
            try:
                return self._training.router.push_pull(shipment, self._wish)
            except MapChanged:
                self._go_over(shipment.name)
            except errors.SequenceGap as error:
                gap = error

    def _await_flight(self, flight: _Flight) -> ExchangeResult:
        try:
            return flight.answer.result()
        except MapChanged:
            # gone over to from this thread, which fills the buckets
            self._go_over(flight.name)
            return self._push(flight.shipment)
        except errors.SequenceGap as gap:
            return self._push(flight.shipment, gap)

    def _rebase(self, name: PushName, gap: errors.SequenceGap, *, in_vain: bool) -> bool:
        """Partitions were restored to before pushes of this worker that nobody can compute again: they are lost, and
        the coordinator has them passed over. Whether there were any. Raises the gap for leased work, and where having
        it passed over was of no use."""
        if in_vain or not isinstance(name.key.source, WorkerSource):
            raise gap
        lost = self._training.rebase(name.first)
        if lost:
            log.warning("pushes of this worker are lost, since partitions were restored: %s", lost)
        return bool(lost)

    def _open_again(self, name: PushName) -> None:
        """Where the map has changed since the last push, beside it. Raises LostWork."""
        moved, self._moved = self._moved, False
        if not moved or isinstance(name.key.source, WorkerSource):
            return
        try:
            self._training.reach(lambda router: router.open_sources([(name.key, name.token)]))
        except errors.StaleToken as error:
            self._give_up(name, error)

    def _go_over(self, name: PushName) -> None:
        """To the newest map. Partitions that were restored do not know of leases that were opened since (rule A5).
        Raises StaleToken."""
        self._training.follow_map()
        if not isinstance(name.key.source, WorkerSource):
            self._training.reach(lambda router: router.open_sources([(name.key, name.token)]))

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        self.drain()
        residual = self._training.pushes.residual(groups)
        if residual is not None:
            log.info("pushes what compression has not sent yet (2-norm %.3g)", residual.norm)
            self.contribute(None, residual.sending)
            self.drain()
        self._session.progress.residual_norm = 0.0

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _land(self, name: PushName, sending: StepInput | None, answered: Callable[[], ExchangeResult]) -> None:
        """Waits for the answer to a push, and puts what it brought into the targets."""
        try:
            answer = answered()
        except (errors.StaleToken, errors.SequenceGap, errors.StraddlingRange) as error:
            if isinstance(name.key.source, WorkerSource):
                # nobody else can have counted it: the servers were restored to before this worker's last pushes
                raise
            self._give_up(name, error)
        except (errors.Unavailable, KeyboardInterrupt):
            if isinstance(name.key.source, WorkerSource):
                self._uncertain = name
            raise
        if isinstance(name.key.source, WorkerSource):
            self._session.progress.pushed = name.last + 1
            if self._pool is None:
                self._pushes += 1
        self._training.pushes.counted(answer)
        self._arrive(answer)
        self._step = max(self._step, answer.version_max)
        self._note(answer, sending)

    def _make_wish(self) -> PullSpec:
        """What is asked for with the next push."""
        return NEWEST

    def _arrive(self, answer: ExchangeResult) -> None:
        """Puts what a push has brought into the targets."""
        assert not answer.missing, answer
        self._training.values.load(answer.ahead)

    def _give_up(self, name: PushName, error: errors.ShardyardError) -> NoReturn:
        """Another worker's now, or counted in part already (rule A12): the lease is gone through again from there."""
        log.info("%s does not count: %s", name, error.what)
        self._training.pushes.not_counted()
        self._take_newest()
        raise LostWork from error


@dataclass(frozen=True)
class _Told:
    """A contribution that all servers have, of which it is not known yet whether it counts. `kept`: what compression
    remembers is as if it did."""

    rank: Rank
    step: int
    answer: ExchangeResult
    sending: StepInput | None
    kept: bool


@dataclass
class _Held:
    """A logical rank that this worker computes. `next`: the next step of it; `highest`: the highest next step over all
    partitions when it was taken up."""

    token: Token
    next: int
    highest: int


class SyncStrategy(Strategy):
    """Computes the logical ranks that are its own, one after the other, each step on exactly that step's version."""

    def __init__(self, training: Trainer) -> None:
        super().__init__(training)
        self._held: dict[Rank, _Held] = {}
        self._version: int | None = None
        self._refused: dict[Rank, Token] = {}
        self._mixed = False
        """Whether what is computed now is so on values, or rows, of different versions."""
        self._step = 0
        backups = self._session.job_settings.consistency.backup_workers
        self._decisions = Decisions(self._session) if backups else None
        self._told: list[_Told] = []
        self._rows: RowPrefetch | None = None
        """Those that have come with the version that the targets hold."""
        self._session.went_over(self._session.consistency)

    @property
    def step(self) -> int:
        if self._version is not None:
            self._step = self._version
        return self._step

    def resume(self) -> None:
        """The version to compute on is that of the rank."""

    def rest(self) -> None:
        """Others wait for ranks, whoever computes them."""

    def drain(self) -> None:
        """Nothing is ever under way: `contribute` returns when the step is complete."""

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002 - nothing more is pushed
        """A step has room for its logical ranks only."""
        self._training.pushes.lose_residual()

    def close(self) -> None:
        """Has no threads."""

    def reload(self) -> None:
        before = self._version
        try:
            self.catch_up(0)
        except ModeChanged:  # in the midst of a forward, whose work does not count
            self._training.pull_newest()
            self._mixed = True
        self._mixed = self._mixed or self._version != before

    def follow_map(self) -> None:
        """In the midst of a forward, or between two batches. The targets stay as they are, and may be of a step that is
        to be computed again."""
        with contextlib.suppress(ModeChanged):  # told when the work is contributed
            self._go_over()
        self._mixed = True

    def rows_version(self) -> int | None:
        return None if self._mixed else self._version

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        """The step of that version is complete everywhere, and another one too: this worker's part in it was another's,
        or came too late."""
        log.info("rows are read as they are now, and the batch does not count: %s", error.what)
        self._mixed = True

    def begin(self) -> None:
        self.catch_up(0)

    def catch_up(self, at_least: int) -> None:
        """Brings the targets to one version of all partitions, where this worker's ranks stand; on standby, to that
        number or a later one. A rank that comes meanwhile may be just what that version waits for."""
        self._following(partial(self._catch_up, at_least))

    def _catch_up(self, at_least: int) -> None:
        while True:
            self._look_for_ranks()
            if self._held:
                self._align()
                return
            number = self._training.pull_step(at_least, unless=self._is_wanted)
            if number is not None:
                self._step = number
                return

    def _is_wanted(self) -> bool:
        """Whether the coordinator has given this worker a rank that it has not looked at."""
        return any(self._refused.get(lease.rank) != lease.token for lease in self._session.ranks())

    def _following(self, do: Callable[[], R]) -> R:
        """Does something that may be begun anew, and does so whenever partitions have moved or were restored."""
        while True:
            try:
                return do()
            except MapChanged:
                self._go_over()

    def _go_over(self) -> None:
        """To the newest map. The job may stand at an earlier step there: what this worker's ranks have to compute next
        is what the servers say."""
        while True:
            try:
                self._training.follow_map()
                self.check_mode()
                for rank, held in sorted(self._held.items()):
                    self._open(rank, held.token)
                break
            except MapChanged:
                continue
        self._version = None

    def check_mode(self) -> None:
        """Raises ModeChanged where there are no steps any more."""
        if self._session.mode is not UpdateMode.SYNC:
            raise ModeChanged

    def due(self) -> Rank | None:
        """The lowest logical rank of this worker that is to be computed on the version that the targets hold."""
        return min((rank for rank, held in self._held.items() if held.next == self._version), default=None)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Those that this worker computes."""
        return tuple(sorted(self._held))

    @property
    def on_standby(self) -> bool:
        """True while other workers compute all ranks."""
        self._following(self._look_for_ranks)
        return not self._held

    def careful_below(self, rank: Rank) -> int:
        """Steps of the rank before this one are announced."""
        return max((lease.careful_below for lease in self._session.ranks() if lease.rank == rank), default=0)

    def highest(self, rank: Rank) -> int:
        """The highest next step of the rank over all partitions."""
        held = self._held[rank]
        return max(held.highest, held.next)

    def name_of(self, rank: Rank) -> PushName:
        held = self._held[rank]
        return PushName(SourceKey(RankSource(rank)), held.token, held.next, held.next)

    def has_moved(self) -> bool:
        """Whether there is a newer map, which this worker has gone over to then: the job may stand at an earlier step.
        For where nothing is asked of the servers, whose answers would have said so."""
        if not self._training.is_behind:
            return False
        self._go_over()
        return True

    def prepare_work(self) -> None:
        """Until a rank is due. The targets then hold its version. Standby must have been asked for before."""
        if self._mixed:  # by a look-up that belongs to no batch
            self._mixed, self._version = False, None
        self._following(self._prepare_work)

    def _prepare_work(self) -> None:
        if self._version is None:
            self._align()
        if self.due() is None:
            self._settle()

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        self._training.values.complete()
        self.check_mode()
        if self._mixed:
            log.info("a batch is dropped: it was computed on values, or rows, of different steps")
            self._mixed, self._version = False, None
            self._training.pushes.not_counted()
            self._following(self._find_work)
            raise LostWork
        try:
            self._contribute(name, sending, upcoming)
        except MapChanged:
            # counted or not: the servers' ledgers say so, and the next batch is what they wait for
            self._training.pushes.not_counted()
            self._told.clear()
            self._go_over()
            self._following(self._prepare_work)
            raise LostWork from None

    def _find_work(self) -> None:
        if self._held:
            self._prepare_work()
        else:
            self._wait_for_ranks()

    def _contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None) -> None:
        if name is None:
            rank = self.due()
            if rank is None:
                self._wait_for_ranks()
                log.info("a batch that was computed on standby is dropped")
                return
            name = self.name_of(rank)
        assert isinstance(name.key.source, RankSource)
        assert self._version is not None
        rank = name.key.source.rank
        if not self._may_begin(self._version):
            log.info("%s does not count: the job stops before step %d", name, self._version)
            self._load_again()  # buffers are those of the batch by now
            raise LostWork
        others = any(held.next == self._version for other, held in self._held.items() if other != rank)
        try:
            if sending is not None and not self._training.pushes.may_count(name, sending, self._version):
                sending = None
            pulls = not others and self._decisions is None
            sending = sending and self._training.pushes.of_rank(rank, sending)
            shipment = self._ship(name, sending, upcoming if pulls else None)
            if not pulls:
                answer = self._training.router.push(shipment)
            else:
                wish = PullSpec(self._version + 1, exactly=True, wait_ms=SLICE_MS, prefetched=True)
                answer = self._training.router.push_pull(shipment, wish)
        except errors.StaleToken as error:
            log.info("%s is another worker's now: %s", name, error.what)
            self._training.pushes.not_counted()
            self._refused[rank] = name.token
            self._held.pop(rank, None)
            self._training.router.abandon_pull()
            self._session.refresh()
            self._wait_for_ranks() if not self._held else self._settle()
            raise LostWork from error
        if self._decisions is not None:
            self._hear_of(_Told(rank, self._version, answer, sending, kept=others))
            return
        self._training.pushes.counted(answer)
        held = self._held[rank]
        held.next += 1
        self._note(answer, sending)
        if others or answer.missing:
            self._settle()
        else:
            self._arrive(answer)

    def goes_on(self, *, begins: bool = False) -> bool:
        """Whether the step of the version that the targets hold is computed; waits until that is settled. `begins`:
        where it is, it takes so long that the job stops behind it rather than without it."""
        assert self._version is not None
        try:
            if begins:
                return self._may_begin(self._version)
            self._await_stop(self._version)
        except MapChanged:
            self._go_over()
            return False
        return self._session.brake.permits(self._version) is True

    def _may_begin(self, step: int) -> bool:
        """As `goes_on`, of a contribution that is made at once."""
        while True:
            self._await_stop(step)
            may = self._session.brake.may_begin(step)
            if may is not None:
                return may

    def _await_stop(self, step: int) -> None:
        brake = self._session.brake
        if brake.permits(step) is not None:
            return

        def waiting_for() -> str:
            if brake.halts:
                return f"partitions in the mode that the job goes over to, before step {step}"
            return f"other workers to hear that the job {'stops' if brake.stop else 'goes over'}, before step {step}"

        with self._session.wait_registry.over(waiting_for):
            while brake.permits(step) is None:
                self._session.refresh()
                if self._training.is_behind:
                    raise MapChanged
                self._training.router.pause(SLICE_MS if brake.halts else STOP_SLICE_MS)

    # ---- versions

    def _ship(self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None) -> PushRequest:
        """`upcoming`: rows of the next step, which come with its version, as that has them."""
        assert self._version is not None
        self._training.pushes.note_rows(sending)
        ahead = self._training.pushes.prefetch_rows(
            self._version + 1, upcoming
        )  # first: what a script says may be refused
        shipment = self._training.pushes.build(name, sending)
        return shipment if ahead is None else replace(shipment, ahead=ahead)

    def _arrive(self, answer: ExchangeResult) -> None:
        assert self._version is not None
        self._training.pushes.note_norm(self._version)
        self._version += 1
        self._load(answer.ahead)
        self._session.reached(self._version)

    def _load(self, ahead: RowPrefetch | None = None) -> None:
        """Puts the version that was reached into the targets. `ahead`: rows that have come with it."""
        self._rows = ahead
        self._load_again()

    def _load_again(self) -> None:
        """The version that the targets hold, buffers too, which a forward may have changed."""
        self._training.values.load(self._rows)

    def _forget_rows(self) -> None:
        """Where it goes on may be another version, or another life of this one."""
        self._rows = None

    def _settle(self) -> None:
        """Until the step is complete, or another rank of it is this worker's to compute (rule B4)."""
        assert self._version is not None
        answer = ExchangeResult()

        def waiting_for() -> str:
            told = explain(answer) if answer.missing or self._decisions is None else "the coordinator says who counts"
            return f"step {self._version} to be complete: {told}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                self._look_for_ranks()
                if self._version is None or not self._held:
                    break
                self._bring_verdict(self._version)
                if self.due() is not None:
                    self._training.router.abandon_pull()
                    self._load_again()
                    return
                wish = PullSpec(self._version + 1, exactly=True, wait_ms=self._slice_ms, prefetched=True)
                try:
                    answer = self._training.router.pull(wish)
                except errors.NotFound:
                    if self._decisions is None:
                        raise
                    self._rejoin()
                    return
                if not answer.missing:
                    self._judge()
                    self._arrive(answer)
                    return
                self._session.check()
        # all ranks were taken, or exchanged for others, which may stand at other steps
        self._judge()
        self._wait_for_ranks()

    def _align(self, *, late: bool = False) -> None:
        """Takes the version at which this worker's ranks stand: the lowest next step among them. Without any (others
        may have taken them over while it went over to another map) it waits for one. `late`: others are in the midst of
        that step; so the next version is waited for, as long as it may be about to come."""
        self._forget_rows()
        if not self._held:
            self._wait_for_ranks()
            return
        version = 0
        answer = ExchangeResult()
        aim: int | None = None
        left_ms = 0
        if late and self._decisions is not None:
            under_way = min(held.next for held in self._held.values())
            left_ms = self._decisions.left_ms(under_way)
            aim = under_way + 1 if left_ms else None

        def waiting_for() -> str:
            return f"version {version} to begin with: {explain(answer)}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                version = min(held.next for held in self._held.values()) if aim is None else aim
                self._training.router.abandon_pull()
                wait_ms = min(left_ms, SLICE_MS) or SLICE_MS
                try:
                    answer = self._training.router.pull(PullSpec(version, exactly=True, wait_ms=wait_ms))
                except errors.NotFound as error:
                    if self._decisions is None or "newest" not in error.facts:
                        raise
                    aim = int(error.facts["newest"]) + 1  # others go on meanwhile: the next one is waited for
                    continue
                if not answer.missing:
                    break
                self._session.check()
                self._look_for_ranks()
                if not self._held:
                    break
                left_ms = max(left_ms - wait_ms, 0)
                if aim is not None and not left_ms:
                    aim = None
                    self._reopen()
                if version:
                    self._bring_verdict(version - 1)
        if self._held and aim is not None:
            self._reopen()
        if not self._held:
            self._wait_for_ranks()
            return
        self._version = version
        self._load()
        self._session.reached(version)

    # ---- backup workers

    def _hear_of(self, told: _Told) -> None:
        """All servers have a contribution, or have dropped it. Raises LostWork where it came late."""
        if any(result.outcome is Outcome.DROPPED for result in told.answer.results):
            self._leave_out(told)
            self._rejoin()
            raise LostWork
        self._held[told.rank].next += 1
        if told.kept:
            self._training.pushes.counted(told.answer)
        self._told.append(told)
        self._settle()

    def _bring_verdict(self, step: int) -> None:
        """Asks who counts in a step, and says it to the servers with the next pull. It is over for the others."""
        if self._decisions is None:
            return
        members = self._decisions.ask(step, [rank for rank, held in self._held.items() if held.next > step])
        self._training.router.set_members(self._decisions.verdict(step))
        for rank, held in self._held.items():
            if members and rank not in members and held.next == step:
                log.debug("step %d is over for logical rank %d, before it was computed", step, rank)
                held.next = step + 1

    @property
    def _slice_ms(self) -> int:
        """After which it is asked again who counts."""
        return min((self._decisions and self._decisions.again_ms) or SLICE_MS, SLICE_MS)

    def _judge(self) -> None:
        """The step of what was contributed last is taken, or others have its ranks: what counts is known."""
        told, self._told = self._told, []
        for each in told:
            assert self._decisions is not None
            members = self._decisions.ask(each.step, ())
            if members and each.rank not in members:
                self._leave_out(each)
                continue
            if not each.kept:
                self._training.pushes.counted(each.answer)
            self._note(each.answer, each.sending)

    def _leave_out(self, told: _Told) -> None:
        log.info(
            "logical rank %d came late with step %d, taken without it; its samples are computed again at the end",
            told.rank,
            told.step,
        )
        if not told.kept:
            self._training.pushes.not_counted()

    def _rejoin(self) -> None:
        """Others have gone on without this worker: where its ranks stand is what the servers say."""
        self._judge()
        self._reopen()
        self._version = None
        self._align(late=True)

    def _reopen(self) -> None:
        for rank in sorted(self._held):
            held = self._held[rank]
            try:
                self._held[rank] = self._opened(rank, held.token)
            except errors.StaleToken:
                self._refused[rank] = held.token
                del self._held[rank]

    # ---- ranks

    def _look_for_ranks(self) -> None:
        """Takes up the logical ranks that the coordinator has given to this worker, gives up those it has taken."""
        leases = {lease.rank: lease.token for lease in self._session.ranks()}
        for rank in sorted(self._held):
            if leases.get(rank) != self._held[rank].token:
                del self._held[rank]
        fresh = sorted(
            (rank, token)
            for rank, token in leases.items()
            if rank not in self._held and self._refused.get(rank) != token
        )
        if fresh and not self._held:
            self._version = None
        for rank, token in fresh:
            self._open(rank, token)

    def _open(self, rank: Rank, token: Token) -> None:
        """Takes up a rank where the servers stand, unless it is another worker's by now."""
        try:
            self._held[rank] = self._opened(rank, token)
        except errors.StaleToken:
            self._refused[rank] = token
            self._held.pop(rank, None)
            return
        log.info("computes logical rank %d from step %d on", rank, self._held[rank].next)

    def _opened(self, rank: Rank, token: Token) -> _Held:
        """As the servers have it. Raises StaleToken."""
        keys = self._keys(rank)
        marks = self._training.router.open_sources([(key, token) for key in keys])
        highest = max(mark.next for key in keys for mark in marks[key])
        return _Held(token, min(mark.next for mark in marks[keys[0]]), highest)

    def _keys(self, rank: Rank) -> list[SourceKey]:
        """Under which the servers' ledgers have a rank, that of its steps first."""
        return [SourceKey(RankSource(rank))]

    def _wait_for_ranks(self) -> None:
        with self._session.wait_registry.over(lambda: "a logical rank to compute; other workers have them all"):
            while self.on_standby:
                self._session.refresh()
                self._session.check()
                if self._training.is_behind:
                    raise MapChanged
                self._pause()
        self._align()

    def _pause(self) -> None:
        self._training.router.pause(SLICE_MS)
