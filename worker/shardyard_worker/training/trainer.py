"""A job's variables from one worker's side: registered, initialised, pushed and pulled as tensors.

Owns: layout, buckets and router of the job, and the targets, the tensors that hold the current values. Invariant: the
targets of a synchronous job hold one version of all partitions, never a mixture; those of an asynchronous one hold, of
each partition, a whole version; where values arrive while they are computed on (ForwardPrefetch), that is what each
target is seen to hold. Must not know: what a push is named after (strategies).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from shardyard.domain import errors
from shardyard.domain.consistency import NO_CLIPPING, BufferMode, UpdateMode
from shardyard.domain.ids import Rank, Token
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.pulls import RowCode
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome, PushKind
from shardyard.domain.variables import VariableKind, VariableSpec
from shardyard.wire import common_messages, layout_messages, methods
from shardyard.wire.table_messages import tables_to_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.compression.error_feedback import ErrorFeedback
from shardyard_worker.compression.residual_state import ResidualCheckpointer, refuse
from shardyard_worker.exchange.device_copies import DeviceCopies, copies_for
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.flat_buffers import Codes, FlatBuffers, Late, Version
from shardyard_worker.exchange.requests import Bases, ExchangeResult, PullSpec, PushRequest
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.exchange.tensor_types import check_tensor, widened
from shardyard_worker.rows.cache_rules import cache_rules
from shardyard_worker.rows.dedup import Int64s
from shardyard_worker.rows.row_cache import RowCache
from shardyard_worker.rows.row_codec import EncodedRows, Rounding
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.session.session import Session
from shardyard_worker.training.clipping import Clipper
from shardyard_worker.training.forward_prefetch import ForwardPrefetch
from shardyard_worker.training.grad_hooks import GradHooks
from shardyard_worker.training.nonfinite import NonFiniteCheck
from shardyard_worker.training.table_binding import TableBinding, TakenRows, Upcoming

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")

PUSHES_PER_RESIDUAL = 64
"""Of so many pushes one looks how much compression has not sent yet."""

SLICE_MS = 200
"""How long a server holds a pull before the worker looks around."""


@dataclass(frozen=True)
class BufferPlace:
    """Where a buffer hangs. Modules may update it in place (BatchNorm) or put a new tensor there."""

    module: torch.nn.Module
    key: str


@dataclass(frozen=True)
class Variable:
    """A variable and the tensor that holds its value in this process."""

    spec: VariableSpec
    target: torch.Tensor
    place: BufferPlace | None = None

    def in_group(self, group: int) -> Variable:
        """The same, of another parameter group."""
        return replace(self, spec=replace(self.spec, group=group))

    @property
    def found(self) -> torch.Tensor | None:
        """What the model has now: the target, or the tensor that a module has put into its place."""
        return self.target if self.place is None else self.place.module._buffers[self.place.key]

    def put_back(self) -> None:
        """The model has the target again."""
        if self.place is not None:
            self.place.module._buffers[self.place.key] = self.target


@dataclass(frozen=True)
class StepInput:
    """What one push carries: for each variable a gradient or value or None, its weight, and the settings in force."""

    tensors: Sequence[torch.Tensor | None]
    weight: float
    groups: tuple[tuple[float, ...], ...]
    coded: bool = True
    """False: as it is, whatever job.compression says."""
    bases: Bases | None = None
    """What gradients were computed on, where the job asks for that."""
    overflow: bool = False
    """Loss scaling has found that the gradients, which are not carried, are beyond their format."""
    rows: TakenRows | None = None
    """GradHooks of rows of tables."""
    highest: int = 0
    """The highest next sequence of its data shard over all partitions, as of its lease: what is before was counted."""


@dataclass(frozen=True)
class Residual:
    """What compression has never sent: its 2-norm, and the push that would send it."""

    norm: float
    sending: StepInput


class StepContext(Protocol):
    """What is known of the step at hand. A job's strategy knows it; another mode has another strategy."""

    def reload(self) -> None:
        """Loads the values again that were on their way to the targets, and were lost with a server."""

    def follow_map(self) -> None:
        """Goes over to the newest map, while a push may be under way. The targets stay as they are."""

    def rows_version(self) -> int | None:
        """The version of which rows are looked up; None: the newest."""

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        """The servers do not have rows of that version any more."""


class Trainer:
    """Registers the variables with the coordinator, and sees to it that the servers have first values."""

    def __init__(
        self,
        session: Session,
        variables: Sequence[Variable],
        optimizer: OptimizerSpec,
        model: torch.nn.Module | None = None,
        tables: TableBinding | None = None,
        *,
        context: Callable[[], StepContext],
    ) -> None:
        """`tables`: of the model, if it has any; their rows are the servers' once first values are there. `context`:
        gives that of the job's present mode; it is called from the first step on."""
        self.session = session
        self._tables = tables
        self._context = context
        self.optimizer = optimizer
        self._pushes = 0
        self.variables = tuple(variables)
        reply = session.ask(methods.REGISTER_VARIABLES, self._registration())
        layout, map_ = layout_messages.layout_from_wire(reply.layout), layout_messages.map_from_wire(reply.map)
        session.follow(reply)
        self._local = session.job_settings.consistency.local_steps is not None
        # local steps are taken in place, and the round's first values are needed at its end
        self._view = session.settings.worker.pull == "view" and not self._local
        self.accumulates = False
        """Whether gradients of the backward at hand are added to by another one before they are pushed."""
        self.accumulates_by_hand = False
        """As said by the script."""
        copies = copies_for(v.target for v in variables if v.spec.kind is VariableKind.PARAMETER)
        self._layout = layout
        if tables is not None:
            tables.adopt(layout)
            self._choose_cache(tables)
        self.feedback = self._make_feedback(copies)
        self.clipper = self._make_clipper()
        self._norm: float | None = None
        self._remembrance = self._make_remembrance()
        self._finiteness = NonFiniteCheck(session, layout, lambda pause_ms: self.router.pause(pause_ms))
        self._targets = {index: variable.target for index, variable in enumerate(self.variables)}
        self._prefetch = self._make_prefetch(model)
        self._late: dict[int, list[Late]] = {}
        self._version: Version = {}
        self._stranded = False
        self._asking_again = False
        self._says_bases = session.job_settings.consistency.stale is not None
        self.bases: Bases | None = None
        """The versions that the targets hold, where the job asks what gradients were computed on."""
        self._settle_in(map_, copies)
        try:
            self._follow(reply)
            if reply.initializer:
                self._initialize()
            self._await_values()
        except BaseException:
            self.close()
            raise

    def _settle_in(self, map_: PartitionMap, copies: DeviceCopies | None, old: FlatBuffers | None = None) -> None:
        """FlatBuffers, router and gradients under a map. `old`: the buckets under the map before."""
        session = self.session
        self.buckets = FlatBuffers(
            self._layout,
            map_,
            shareable=session.settings.worker.same_host == "auto",
            slots=session.settings.worker.window + 1,
            copies=copies,
        )
        if old is not None:
            self.buckets.take_over(old)
        compression = session.job_settings.compression
        coding = str(compression.pull_rules) if compression.pull_rules.compresses else ""
        self.router = ServerGroup(
            session,
            map_,
            self.buckets,
            coding=coding,
            order=self._order,
            follows=old is not None,
            tables=self._tables is not None,
        )
        # rows follow the payload, which must not be there before its header then
        overlaps = session.settings.worker.overlap == "always" and self.feedback is None and self._tables is None
        self._gradients = GradHooks(
            self.buckets,
            {} if self.feedback is not None or self._local else self._targets,
            ready=self.router.ready if overlaps else None,
            partial_now=lambda: self.accumulates or self.accumulates_by_hand,
        )

    def _order(self) -> tuple[int, ...]:
        """Indices of variables in the order in which the model needs their values; empty: all at once."""
        return () if self._prefetch is None else self._prefetch.order

    def _registration(self) -> wire.RegisterVariablesRequest:
        return wire.RegisterVariablesRequest(
            caller=common_messages.caller_to_wire(self.session.caller),
            variables=[layout_messages.variable_to_wire(variable.spec) for variable in self.variables],
            optimizer=layout_messages.optimizer_to_wire(self.optimizer),
            tables=[] if self._tables is None else tables_to_wire(self._tables.settings),
        )

    def follow_map(self) -> None:
        """Goes over to the newest map. GradHooks that were filled in, and the current values, stay what they are."""
        session = self.session
        reply = session.ask(methods.REGISTER_VARIABLES, self._registration())
        map_ = layout_messages.map_from_wire(reply.map)
        log.info("the job's partitions are at generation %d", map_.generation)
        mode = session.mode
        session.follow(reply)
        if session.mode is not mode:
            self.clipper = self._make_clipper()
            if self._tables is not None:
                self._choose_cache(self._tables)
        if self.cache is not None:
            self.cache.clear()  # partitions may have gone back
        self._gradients.close()
        self.router.close()
        old, current = self.buckets, self.router.current
        self._stranded = bool(self._late)
        with torch._C.DisableTorchFunctionSubclass():  # looks at targets, not at what they hold
            copies = copies_for(v.target for v in self.variables if v.spec.kind is VariableKind.PARAMETER)
            self._settle_in(map_, copies, old)
            self.router.current = current
        if self.feedback is not None and copies is not None:
            with self.between_pushes():
                self.feedback.use(copies)
        old.close()
        self._follow(reply)

    def _choose_cache(self, tables: TableBinding) -> None:
        """Rows are kept for steps to come in the mode that the job goes by. One that has gone over to steps reads all
        of them; one that begins so refuses such a worker. Raises ConfigurationError."""
        session = self.session
        if session.mode is UpdateMode.SYNC and session.consistency.number:
            if session.settings.worker.cached_rows_bytes:
                log.warning("no rows are kept for steps to come (worker.cached_rows_bytes): the job is in mode sync")
            tables.cache = None
            return
        rules = cache_rules(session.settings.worker, session.job_settings)
        tables.cache = None if rules is None else RowCache(rules)

    @property
    def cache(self) -> RowCache | None:
        """Rows that this worker keeps for steps to come, if it keeps any."""
        return None if self._tables is None else self._tables.cache

    @property
    def is_behind(self) -> bool:
        """Whether there is a newer map."""
        return self.router.is_behind

    def reach(self, ask: Callable[[ServerGroup], R]) -> R:
        """Asks under the newest map, again whenever there is a newer one: for what has the same name, or the same
        meaning, under each."""
        while True:
            try:
                return ask(self.router)
            except MapChanged:
                self.follow_map()

    def rebase(self, next_sequence: int) -> str:
        """Has the partitions go on with this worker's own source at that sequence (rule A11). What they lacked before
        it, for people; empty where they lacked nothing."""
        caller = common_messages.caller_to_wire(self.session.caller)
        reply = self.session.ask(methods.REBASE_SOURCE, wire.RebaseSourceRequest(caller=caller, next=next_sequence))
        return "; ".join(f"#{each.first} to #{each.last} in partition {each.partition}" for each in reply.lost)

    def close(self) -> None:
        if self._tables is not None:
            self._tables.end()
        if self._remembrance is not None:
            self.session.on_heard = None
            self._remembrance.close()
        if self._prefetch is not None:
            self._prefetch.close()
        self._gradients.close()
        self.router.detach()
        self.router.close()
        self.buckets.close()

    def _make_prefetch(self, model: torch.nn.Module | None) -> ForwardPrefetch | None:
        if self.session.settings.worker.prefetch == "never":
            return None
        compression = self.session.job_settings.compression
        if compression.pull_rules.compresses:
            raise errors.ConfigurationError(
                f"worker.prefetch always in a job with job.compression.pull {compression.pull!r}",
                why="codes are decoded when all have come",
                todo="set worker.prefetch to never, or job.compression.pull to none",
            )
        if model is not None and any(_is_compiled(module) for module in model.modules()):
            log.info("worker.prefetch: a compiled model waits for all of its values in optimizer.step()")
            return None
        return ForwardPrefetch(self._targets, model, self._bring)

    def _make_feedback(self, copies: DeviceCopies | None) -> ErrorFeedback | None:
        compression, worker = self.session.job_settings.compression, self.session.caller.incarnation
        if not compression.push_rules.compresses:
            return None
        devices = [variable.target.device for variable in self.variables]
        return ErrorFeedback(
            compression, self._layout, seed=self.session.seed, worker=worker, copies=copies, devices=devices
        )

    def _make_clipper(self) -> Clipper | None:
        """Of gradients that are updates by themselves; those of a synchronous step are clipped as their mean, by the
        servers."""
        clipping = self.session.job_settings.clip.clipping
        if clipping == NO_CLIPPING or self.session.mode is UpdateMode.SYNC:
            return None
        return Clipper(clipping, self._layout.variables)

    def _make_remembrance(self) -> ResidualCheckpointer | None:
        rules = self.session.job_settings.compression.push_rules
        if self.feedback is None or not rules.keep_feedback(self._layout.variables):
            return None
        made = ResidualCheckpointer(self.session, self.feedback, self._layout)
        self.session.on_heard = made.hear
        return made

    def _follow(self, reply: wire.RegisterVariablesReply) -> None:
        """Before the next push under this map: where the job went back, so does what compression has not sent."""
        if self._remembrance is not None:
            self._remembrance.follow(reply)
        else:
            refuse(self.session, reply)

    def between_pushes(self) -> contextlib.AbstractContextManager[None]:
        """Within it no other thread looks at what compression remembers."""
        return contextlib.nullcontext() if self._remembrance is None else self._remembrance.between.held()

    # ---- pushes and pulls

    def may_count(self, name: PushName, sending: StepInput, step: int) -> bool:
        """Whether gradients that were computed to that step are finite, or are to count all the same; else it is
        written down that this work does not. Raises StaleToken, StraddlingRange, and what ends this worker
        or its job."""
        if sending.overflow or not sending.coded:
            return True
        rows = [] if sending.rows is None else [(each.table, each.values) for each in sending.rows.tables]
        return self._finiteness.counts(name, sending.tensors, step, sending.highest, rows)

    def of_rank(self, rank: Rank, sending: StepInput) -> StepInput:
        """What that logical rank sends of it: where buffers are those of the first one, the others leave them out."""
        if rank == 0 or self.session.job_settings.buffers is not BufferMode.FIRST:
            return sending
        kept = [
            None if variable.place is not None else tensor
            for variable, tensor in zip(self.variables, sending.tensors, strict=True)
        ]
        return replace(sending, tensors=kept)

    def ship(self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None = None) -> PushRequest:
        """Puts what is sent into the buckets. None: a named empty push. `upcoming`: the rows that come along. Raises
        what the script raises when it announces ids, and InvalidRequest."""
        joined = self._announced(upcoming)  # first: what a script says may be refused
        shipment = self._ship(name, sending)
        if self._tables is None:
            return shipment
        step, cache = 0, self._tables.cache
        if cache is not None and self.session.mode is UpdateMode.ASYNC:
            self.pushes_rows(sending)
            step = cache.step + 1
            cache.begin(step)
        # what comes along with this push has it
        ahead = self._tables.look_ahead(joined, step=step + self.session.settings.worker.window, as_of=step)
        return shipment if ahead is None else replace(shipment, ahead=ahead)

    def _announced(self, upcoming: Upcoming | None) -> Mapping[int, Int64s]:
        """By table the ids that a script says it will look up."""
        # values that come in an order, as they are used, leave no place for rows
        if self._tables is None or upcoming is None or self._prefetch is not None:
            return {}
        return self._tables.joined(upcoming())

    def pushes_rows(self, sending: StepInput | None) -> None:
        """These gradients of rows, if there are any, are sent with the step at hand, and clipped."""
        if self._tables is not None and sending is not None and sending.rows is not None:
            is_exact = self.session.job_settings.compression.rows_push is RowCode.FLOAT32
            self._tables.pushed(sending.rows, exact=is_exact and self.session.mode is UpdateMode.ASYNC)

    def prefetch_rows(self, step: int, upcoming: Upcoming | None) -> RowPrefetch | None:
        """The rows of a step's batches, which come along with its values. Raises as `ship`."""
        joined = self._announced(upcoming)
        return self._tables.look_ahead(joined, step=step, as_of=step) if joined and self._tables is not None else None

    def _ship(self, name: PushName, sending: StepInput | None) -> PushRequest:
        if sending is None:
            return PushRequest(name, PushKind.EMPTY, 0.0)
        if self.clipper is not None and sending.coded:  # what is sent uncoded was clipped when it was first to be sent
            for spec, tensor in zip(self._layout.variables, sending.tensors, strict=True):
                if tensor is not None:
                    check_tensor(spec, tensor)
            self.clipper.clip(sending.tensors, () if sending.rows is None else sending.rows.tensors)
        if self._prefetch is not None:
            self._prefetch.settle_order()
        absent = frozenset([index for index, tensor in enumerate(sending.tensors) if tensor is None])
        rows = None if sending.rows is None else self._coded(sending.rows, name)
        codes = None
        if self.feedback is not None and sending.coded:
            codes = self._encode(self.feedback, name, sending.tensors)
        else:
            self.buckets.fill(sending.tensors)
        return PushRequest(
            name,
            PushKind.GRADIENT,
            sending.weight,
            sending.groups,
            absent,
            codes,
            self.buckets.slot,
            bases=sending.bases,
            overflow=sending.overflow,
            rows=rows,
        )

    def _coded(self, rows: TakenRows, name: PushName) -> EncodedRows:
        session = self.session
        code = session.job_settings.compression.rows_push
        return EncodedRows(rows.tables, rows.groups, Rounding(code, session.seed, _work(name)))

    def _encode(self, feedback: ErrorFeedback, name: PushName, tensors: Sequence[torch.Tensor | None]) -> Codes:
        for spec, tensor in zip(self._layout.variables, tensors, strict=True):
            if tensor is not None:
                check_tensor(spec, tensor)
        tensors = [None if each is None else widened(each) for each in tensors]
        self._begin_push()
        return self.buckets.encode(tensors, partial(feedback.encode, work=_numbers(name)))

    def _begin_push(self) -> None:
        if self._remembrance is not None:
            self._remembrance.between.begin()

    def _end_push(self) -> None:
        if self._remembrance is not None:
            self._remembrance.between.end()

    def took(self, step: int) -> None:
        """The targets hold what that step of a synchronous job has made."""
        norm = self.router.norm_of(step)
        self._norm = self._norm if norm is None else norm

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of the last gradient that was clipped by norm, before that."""
        return self._norm if self.clipper is None else self.clipper.norm

    def counted(self, answer: ExchangeResult) -> None:
        """A push was answered: what other workers' pushes of the same work had brought is not taken as sent."""
        if self.cache is not None and any(result.outcome is Outcome.DUPLICATE for result in answer.results):
            self.cache.clear()  # what this push would have changed was changed by another one
        if self.feedback is not None:
            if answer.foreign:
                parts = [self._layout.partitions[partition] for partition in sorted(answer.foreign)]
                self.feedback.undo(block for part in parts for block in part.blocks)
            self.feedback.commit()
            self._tell_residual()
            self._end_push()

    def _tell_residual(self) -> None:
        """What would be lost if this process died now; it takes a pass over all of it, so only now and then."""
        assert self.feedback is not None
        if self._pushes % PUSHES_PER_RESIDUAL == 0:
            norm = self.feedback.lost_norm
            self.session.progress.residual_norm = norm if math.isfinite(norm) else 0.0
        self._pushes += 1

    def not_counted(self) -> None:
        """The push was refused: it counts nowhere."""
        if self.cache is not None:
            self.cache.clear()
        if self.feedback is not None:
            self.feedback.undo()
            self._end_push()

    def lose_residual(self) -> None:
        """What compression has never sent is lost with this worker."""
        if self._remembrance is not None:
            self._remembrance.lose()

    def residual(self, groups: tuple[tuple[float, ...], ...]) -> Residual | None:
        """What compression has never sent, as a gradient under these settings, if there is any. A checkpoint that has
        it is waited for."""
        if self._remembrance is not None:
            self._remembrance.settle()
        with self.between_pushes():
            found = {} if self.feedback is None else self.feedback.residuals()
        if not found or self.feedback is None:
            return None
        tensors = [
            torch.from_numpy(found[index]).view(variable.spec.shape) if index in found else None
            for index, variable in enumerate(self.variables)
        ]
        return Residual(self.feedback.lost_norm, StepInput(tensors, 1.0, groups, coded=False))

    def give_away(self) -> None:
        """What was shipped is under way, and must not change: gradients are not the model's any more, also those that
        lie elsewhere, so that it is the same for all."""
        for target in self._targets.values():
            target.grad = None
        self.buckets.next_slot()

    def moved(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """How far each of these targets is from the current version's value: that minus what the target holds. It lies
        where the next push sends it from, where it can."""
        found: dict[int, torch.Tensor] = {}
        for index in indices:
            target, view = self._targets[index], self.buckets.view(index)
            fits = view is not None and (view.device, view.dtype) == (target.device, target.dtype)
            found[index] = view if view is not None and fits else torch.empty_like(target)
        self.buckets.load(found)
        with torch.no_grad():
            for index, values in found.items():
                values.sub_(self._targets[index])
        return found

    def load(self, ahead: RowPrefetch | None = None) -> None:
        """Puts the current version into the targets, and those into the model. What is still on its way follows when it
        is used. `ahead`: rows that have come with it."""
        if self._tables is not None:
            self._tables.arrive(ahead)
        if self._says_bases and not self._asking_again:  # else some of what is computed on is older than what comes
            self.bases = {part.partition: part.version for parts in self.router.current for part in parts}
        if self._prefetch is None:
            for variable in self.variables:
                variable.put_back()
            self.buckets.load(self._targets, view=self._view)
            return
        wanted: Iterable[int] = self._targets
        if self._asking_again:  # in the midst of a forward; what it has used must stay
            wanted = self._prefetch.awaited
        late = {index: found for index in wanted if (found := self.buckets.late(index))}
        for index in wanted:
            self.variables[index].put_back()
        self._version, self._stranded = self.buckets.version, False
        self._put([index for index in wanted if index not in late])
        self._late = late
        self._prefetch.expect(late)
        unmarkable = [index for index in late if not self._prefetch.can_await(index)]
        if unmarkable:
            self._prefetch.take(unmarkable)

    def complete(self) -> None:
        """Until the targets hold all of what is on its way to them. Before anything else is asked of the servers."""
        if self._late and self._prefetch is not None:
            self._prefetch.take_all()

    def _bring(self, indices: Sequence[int]) -> None:
        """Values that are used now, or that somebody else needs, into their targets."""
        try:
            if self._stranded:
                raise errors.ServerUnavailable("partitions have moved")
            for index in indices:
                for late in self._late.get(index, ()):
                    with self.session.wait_registry.over(partial(_awaited, self.variables[index], late)):
                        late.arrival.wait(late.begin, late.end)
        except errors.Unavailable as error:
            log.info("values that were on their way are asked for again (%s)", error.what)
            self._asking_again = True
            try:
                self._context().reload()
            finally:
                self._asking_again = False
            return
        self._put(indices)
        for index in indices:
            self._late.pop(index, None)

    def _put(self, indices: Sequence[int]) -> None:
        targets = {index: self._targets[index] for index in indices}
        with torch._C.DisableTorchFunctionSubclass():
            self.buckets.load(targets, view=self._view, version=self._version)

    def pull_newest(self) -> ExchangeResult:
        """Puts the newest version of each partition into the targets; for an asynchronous job, which has no other."""
        self.router.abandon_pull()
        answer = self.reach(lambda router: router.pull(PullSpec(0, exactly=False)))
        if answer.missing:
            raise errors.NotReady(f"version 0 of an open job is not there: {explain(answer)}")
        self.load()
        return answer

    def pull_step(self, at_least: int, *, unless: Callable[[], bool] = lambda: False) -> int | None:
        """Waits for a version, and puts it or a later one into the targets: the same of all partitions, while others
        go on with the steps of a synchronous job. Its number. Gives up, None, when `unless`, which is asked now and
        then."""
        number, answer = at_least, ExchangeResult()
        with self.session.wait_registry.over(lambda: f"version {number}: {explain(answer)}"):
            self.router.abandon_pull()
            while True:
                try:
                    pull = PullSpec(number, exactly=True, wait_ms=SLICE_MS)
                    answer = self.reach(partial(ServerGroup.pull, pull=pull))
                except errors.NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    number = max(number + 1, int(error.facts["newest"]))
                    self.router.abandon_pull()
                    continue
                if not answer.missing:
                    break
                self.session.check()
                if unless():
                    self.router.abandon_pull()
                    return None
        self.load()
        return number

    # ---- first values

    def _initialize(self) -> None:
        caller = self.session.caller
        while True:
            self.reach(self._give_values)
            generation = self.router.generation
            request = wire.CommitVariablesRequest(caller=common_messages.caller_to_wire(caller), generation=generation)
            try:
                self.session.ask(methods.COMMIT_VARIABLES, request)
            except errors.StaleGeneration as error:
                log.info("the servers are given first values again (%s)", error.what)
                self.follow_map()
            else:
                log.info("gave the servers their first values")
                return

    def _give_values(self, router: ServerGroup) -> None:
        name = PushName(SourceKey(WorkerSource(self.session.caller.incarnation)), Token(0), 0, 0)
        self.buckets.fill([variable.target for variable in self.variables])
        router.initialize(PushRequest(name, PushKind.VALUES, 0.0))
        for table in () if self._tables is None else self._tables.first_rows():
            for piece in table.cut():
                router.initialize_rows(name, EncodedRows([piece]))

    def _await_values(self) -> None:
        """Until the servers have first values: another worker gives them, or, if it dies, this one."""
        answer = ExchangeResult()
        with self.session.wait_registry.over(lambda: f"first values: {explain(answer)}"):
            while True:
                answer = self.reach(lambda router: router.pull(PullSpec(0, exactly=False, wait_ms=SLICE_MS)))
                if not answer.missing:
                    return
                self.session.check()
                if self.session.initializer:
                    self._initialize()


def _awaited(variable: Variable, late: Late) -> str:
    return f"the value of {variable.spec.name!r} from server {late.arrival.server}"


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _numbers(name: PushName) -> tuple[int, ...]:
    """The numbers of a name that mean the same work, whoever does it; a worker's own pushes have none."""
    match name.key.source:
        case RankSource(rank):
            return (0, rank, name.first)
        case DataShardSource(feed, epoch, index):
            return (1, feed, epoch, index, name.first)
        case _:
            return ()


def _work(name: PushName) -> tuple[int, ...]:
    """The numbers of a name, without the token, which others who do the work have another of."""
    source = name.key.source
    mine = (2, source.incarnation) if isinstance(source, WorkerSource) else ()
    return (*_numbers(name), *mine, name.first, name.last)


def explain(answer: ExchangeResult) -> str:
    """What an unfinished pull waits for, the same wait of several partitions once."""
    waits: dict[tuple[int, str], list[int]] = {}
    for item in answer.missing:
        waits.setdefault((item.have.number, item.waiting_for), []).append(item.partition)
    return "; ".join(
        f"partition {', '.join(map(str, sorted(partitions)[:8]))} at version {number} waits for {what}"
        for (number, what), partitions in list(waits.items())[:4]
    )
