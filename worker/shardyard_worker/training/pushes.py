"""Turns gradients into a push: checks, clips and compresses them, adds table rows, and handles the answer.

Owns: error feedback, clipping, and their order. Invariants: a push that is refused leaves no trace in the error
feedback; gradients that are not finite are reported before the push. Must not know: how a push is named, how it
travels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from shardyard.domain.consistency import NO_CLIPPING, BufferMode, UpdateMode
from shardyard.domain.ids import Rank
from shardyard.domain.pulls import RowCode
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, WorkerSource
from shardyard.domain.pushes import Outcome, PushKind
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.compression.error_feedback import ErrorFeedback
from shardyard_worker.compression.residual_state import ResidualCheckpointer, refuse
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies
from shardyard_worker.exchange.buffers.flat_buffers import Codes
from shardyard_worker.exchange.buffers.tensor_types import check_tensor, widened
from shardyard_worker.exchange.requests import ExchangeResult, PushRequest
from shardyard_worker.rows.dedup import Int64s
from shardyard_worker.rows.row_codec import EncodedRows, Rounding
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.session.session import Listener
from shardyard_worker.training.clipping import Clipper
from shardyard_worker.training.loading import ValueLoader
from shardyard_worker.training.nonfinite import NonFiniteCheck
from shardyard_worker.training.table_binding import TakenRows, Upcoming
from shardyard_worker.training.variables import Residual, ServerLink, StepInput

PUSHES_PER_RESIDUAL = 64
"""One in this many pushes reports the residual's norm, since that takes a pass over all of it."""


class PushBuilder:
    """Builds one push at a time, in the thread that trains."""

    _listener: Listener

    def __init__(self, link: ServerLink, values: ValueLoader, copies: DeviceCopies | None) -> None:
        """Raises ConfigurationError."""
        self._link = link
        self._session = session = link.session
        self._values = values
        self._pushes = 0
        self._norm: float | None = None
        self.feedback: ErrorFeedback | None = None
        self._checkpointer: ResidualCheckpointer | None = None
        rules = session.job_settings.compression.push_rules
        self.use_layout(copies)
        self.clipper = self._make_clipper()
        if self.feedback is not None and rules.keep_feedback(link.layout.variables):
            self._checkpointer = ResidualCheckpointer(session, self.feedback, link.layout)
            self._listener = Listener(on_heartbeat=self._checkpointer.on_heartbeat)
            session.listen(self._listener)
        on_host = any(variable.target.device.type == "cpu" for variable in link.variables)
        self.nonfinite = NonFiniteCheck(
            session, link.layout, lambda pause_ms: link.router.pause(pause_ms), on_host=on_host
        )

    def use_layout(self, copies: DeviceCopies | None) -> None:
        """From now on pushes are of the link's layout. Nothing is left of a residual."""
        link, session = self._link, self._session
        if session.job_settings.compression.push_rules.compresses:
            self.feedback = ErrorFeedback(
                session.job_settings.compression,
                link.layout,
                seed=session.seed,
                worker=session.caller.incarnation,
                copies=copies,
                devices=[variable.target.device for variable in link.variables],
            )

    def close(self) -> None:
        if self._checkpointer is not None:
            self._session.stop_listening(self._listener)
            self._checkpointer.close()

    def _make_clipper(self) -> Clipper | None:
        """None in a synchronous job whose servers clip the mean of a step. Replicas clip it themselves."""
        settings = self._session.job_settings
        clipping, by_servers = settings.clip.clipping, not settings.has_replicas
        if clipping == NO_CLIPPING or (by_servers and self._session.mode is UpdateMode.SYNC):
            return None
        return Clipper(clipping, self._link.layout.variables)

    def on_mode_change(self) -> None:
        self.clipper = self._make_clipper()

    def use(self, copies: DeviceCopies | None) -> None:
        """From now on encodes on these lanes."""
        if self.feedback is not None and copies is not None:
            with self.between_pushes():
                self.feedback.use(copies)

    def follow(self, reply: wire.RegisterVariablesReply) -> None:
        """Called before the next push under the reply's map. If the job went back to a checkpoint, so does the
        residual."""
        if self._checkpointer is not None:
            self._checkpointer.follow(reply)
        else:
            refuse(self._session, reply)

    def between_pushes(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block no other thread reads or changes the error feedback."""
        return contextlib.nullcontext() if self._checkpointer is None else self._checkpointer.boundary.held()

    # ---- before a push

    def may_count(self, name: PushName, sending: StepInput, step: int) -> bool:
        """Whether these gradients, computed at `step`, are finite, or count anyway. If not, the coordinator has
        recorded that this work does not count. Raises StaleToken, StraddlingRange, and what ends this worker or its
        job."""
        if sending.overflow or not sending.coded:
            return True
        return self.nonfinite.counts(name, sending.tensors, step, sending.highest, sending.table_rows)

    def of_rank(self, rank: Rank, sending: StepInput) -> StepInput:
        """The part that this logical rank sends. With job.buffers first, only rank 0 sends buffers."""
        if rank == 0 or self._session.job_settings.buffers is not BufferMode.FIRST:
            return sending
        kept = [
            None if variable.place is not None else tensor
            for variable, tensor in zip(self._link.variables, sending.tensors, strict=True)
        ]
        return replace(sending, tensors=kept)

    def build(self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None = None) -> PushRequest:
        """Puts gradients into the flat buffers, or encodes them. None: a named empty push. `upcoming`: the rows to
        look up with the push. Raises what the script raises when it announces ids, and InvalidRequest."""
        announced = self._announced(upcoming)  # first, since it may be refused
        push = self._build(name, sending)
        tables = self._link.tables
        if tables is None:
            return push
        step, cache = 0, tables.cache
        if cache is not None and self._session.mode is UpdateMode.ASYNC:
            self.note_rows(sending)
            step = cache.step + 1
            cache.begin(step)
        # the rows come after this push has been applied
        ahead = tables.look_ahead(announced, step=step + self._session.settings.worker.window, as_of=step)
        push.ahead = ahead
        return push

    def _announced(self, upcoming: Upcoming | None) -> Mapping[int, Int64s]:
        """The ids that the script will look up, by table."""
        tables = self._link.tables
        return {} if tables is None or upcoming is None else tables.joined(upcoming())

    def note_rows(self, sending: StepInput | None) -> None:
        """Tells the row cache which gradients this step sends."""
        tables = self._link.tables
        if tables is not None and sending is not None and sending.rows is not None:
            is_exact = self._session.job_settings.compression.rows_push is RowCode.FLOAT32
            tables.pushed(sending.rows, exact=is_exact and self._session.mode is UpdateMode.ASYNC)

    def prefetch_rows(self, step: int, upcoming: Upcoming | None) -> RowPrefetch | None:
        """The rows of a step's batches, to be looked up with its values. Raises as `build`."""
        announced, tables = self._announced(upcoming), self._link.tables
        return tables.look_ahead(announced, step=step, as_of=step) if announced and tables is not None else None

    def _build(self, name: PushName, sending: StepInput | None) -> PushRequest:
        if sending is None:
            return PushRequest(name, PushKind.EMPTY, 0.0)
        if self.clipper is not None and sending.coded:  # a residual was clipped as part of its gradients
            self._check(sending.tensors)
            self.clipper.clip(sending.tensors, () if sending.rows is None else sending.rows.tensors)
        self._values.on_gradient()
        absent = frozenset([index for index, tensor in enumerate(sending.tensors) if tensor is None])
        rows = None if sending.rows is None else self._encode_rows(sending.rows, name)
        codes = None
        if self.feedback is not None and sending.coded:
            codes = self._encode(self.feedback, name, sending.tensors)
        else:
            self._link.buffers.fill(sending.tensors)
        return PushRequest(
            name,
            PushKind.GRADIENT,
            sending.weight,
            sending.groups,
            absent,
            codes,
            self._link.buffers.slot,
            bases=sending.bases,
            overflow=sending.overflow,
            rows=rows,
        )

    def _check(self, tensors: Sequence[torch.Tensor | None]) -> None:
        for spec, tensor in zip(self._link.layout.variables, tensors, strict=True):
            if tensor is not None:
                check_tensor(spec, tensor)

    def _encode_rows(self, rows: TakenRows, name: PushName) -> EncodedRows:
        code = self._session.job_settings.compression.rows_push
        return EncodedRows(rows.tables, rows.groups, Rounding(code, self._session.seed, _seed_of(name)))

    def _encode(self, feedback: ErrorFeedback, name: PushName, tensors: Sequence[torch.Tensor | None]) -> Codes:
        self._check(tensors)
        wide = [None if each is None else widened(each) for each in tensors]
        if self._checkpointer is not None:
            self._checkpointer.boundary.begin()
        return self._link.buffers.encode(wide, partial(feedback.encode, work=_work(name)))

    def release_gradients(self) -> None:
        """The push is in flight, so its gradients must not change: the model gets new ones. Copied gradients are
        released too, so that all behave the same."""
        for variable in self._link.variables:
            variable.target.grad = None
        self._link.buffers.next_slot()

    # ---- after a push

    def counted(self, answer: ExchangeResult) -> None:
        """A push was answered. If another worker's push of the same work counted first, this one has sent nothing."""
        cache = None if self._link.tables is None else self._link.tables.cache
        if cache is not None and any(result.outcome is Outcome.DUPLICATE for result in answer.results):
            cache.clear()  # another push has changed the rows that this push was to change
        if self.feedback is not None:
            if answer.foreign:
                parts = [self._link.layout.partitions[partition] for partition in sorted(answer.foreign)]
                self.feedback.undo(block for part in parts for block in part.blocks)
            self.feedback.commit()
            if self._pushes % PUSHES_PER_RESIDUAL == 0:
                norm = self.feedback.lost_norm
                self._session.progress.residual_norm = norm if math.isfinite(norm) else 0.0
            self._pushes += 1
            self._end_push()

    def not_counted(self) -> None:
        """The push was refused, so it counts nowhere."""
        if self._link.tables is not None and self._link.tables.cache is not None:
            self._link.tables.cache.clear()
        if self.feedback is not None:
            self.feedback.undo()
            self._end_push()

    def _end_push(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.boundary.end()

    def note_norm(self, step: int) -> None:
        """Notes the norm of a synchronous step, whose result the targets hold now."""
        norm = self._link.router.norm_of(step)
        self._norm = self._norm if norm is None else norm

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of the last gradient that was clipped by norm, before clipping."""
        return self._norm if self.clipper is None else self.clipper.norm

    # ---- before leaving

    def residual(self, groups: tuple[tuple[float, ...], ...]) -> Residual | None:
        """The residual as a gradient under these settings, if there is any. Waits for a checkpoint that contains it."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_checkpoint()
        with self.between_pushes():
            found = {} if self.feedback is None else self.feedback.residuals()
        if not found or self.feedback is None:
            return None
        tensors = [
            torch.from_numpy(found[index]).view(variable.spec.shape) if index in found else None
            for index, variable in enumerate(self._link.variables)
        ]
        return Residual(self.feedback.lost_norm, StepInput(tensors, 1.0, groups, coded=False))

    def lose_residual(self) -> None:
        """Reports that the residual is lost with this worker."""
        if self._checkpointer is not None:
            self._checkpointer.lose()


def _work(name: PushName) -> tuple[int, ...]:
    """The numbers that name the work, whichever worker does it. A worker's own pushes have none."""
    match name.key.source:
        case RankSource(rank):
            return (0, rank, name.first)
        case DataShardSource(feed, epoch, index):
            return (1, feed, epoch, index, name.first)
        case _:
            return ()


def _seed_of(name: PushName) -> tuple[int, ...]:
    """The numbers of a name, without its token, which differs between workers that do the same work."""
    source = name.key.source
    mine = (2, source.incarnation) if isinstance(source, WorkerSource) else ()
    return (*_work(name), *mine, name.first, name.last)
