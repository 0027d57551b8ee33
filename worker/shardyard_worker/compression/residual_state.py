"""A worker's residual in checkpoints: saved when the coordinator asks, restored when the job goes back to one.

Owns: the worker's file, and the thread that reads and writes it during training. Invariants: a state is copied between
two pushes. After the job has gone back, the state is restored before the next push under the new map. Another worker's
residual is read and checked, then claimed at the coordinator, then added, so exactly one worker sends it, once. A
worker that leaves an asynchronous job pushes its residual when no checkpoint that contains it is being taken; it waits
for that only for a bounded time. Must not know: the parts of the state (error_feedback), what is pushed.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final, TypeVar

from shardyard.checkpoints.convert import residual_from_wire
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import worker_name
from shardyard.checkpoints.residual_file import State
from shardyard.domain import limits
from shardyard.domain.errors import NotFound, ShardyardError
from shardyard.domain.layout.layouts import JobLayout
from shardyard.storage.encryption import encrypted, keys_in
from shardyard.storage.storage import open_storage
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.compression.error_feedback import ErrorFeedback
from shardyard_worker.compression.push_boundary import PushBoundary
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")

READY_AGAIN_MS: Final = 10
CHECKPOINT_WAIT_MS: Final = 30_000
"""How long a worker that leaves waits for a checkpoint that contains its residual."""
CHECKPOINT_AGAIN_MS: Final = 50


class ResidualCheckpointer:
    """For one worker in one job. Any thread may call `on_heartbeat`; the training thread calls the rest."""

    def __init__(self, session: Session, feedback: ErrorFeedback, layout: JobLayout) -> None:
        self.boundary = PushBoundary()
        self._session = session
        self._feedback = feedback
        self._layout = layout
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._busy = False
        self._following = False
        self._adding = False
        self._closed = False
        self._leaving = False
        self._asked = 0
        """The number of the checkpoint for which the coordinator asks to save; 0: none."""
        self._copied = 0
        """The number of the checkpoint for which the state was last copied."""
        self._restores = 0
        """How often the job had gone back to a checkpoint when this worker last restored its state."""
        self._added: set[tuple[int, str]] = set()
        self._reading = threading.Lock()

    # ---- from heartbeats

    def on_heartbeat(self, reply: wire.HeartbeatReply) -> None:
        """Begins what the coordinator requests, in another thread. If it cannot begin yet, the coordinator repeats the
        request."""
        self._asked = reply.save_residual.number if reply.HasField("save_residual") else 0
        # the worker's own state, and residuals of a map that it does not follow yet, are restored by `follow`
        others = tuple(each for each in reply.feedback if not each.own and each.generation <= self._restores)
        follows = (
            reply.restored_generation <= self._restores and not self._following and len(others) == len(reply.feedback)
        )
        number = self._asked if follows and self._asked != self._copied else 0
        if not number and not others:
            return
        with self._lock:
            if self._busy or self._leaving or self._closed:
                return
            self._busy, self._adding = True, bool(others)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "feedback")
            done = self._thread.submit(self._carry_out, others, number, reply.save_residual.url)
            done.add_done_callback(_log_failure)

    def _carry_out(self, others: Iterable[wire.CheckpointResidual], number: int, url: str) -> None:
        try:
            for handed in others:
                self._add(handed)
            self._adding = False
            if number:
                self._save(number, url)
        except CancelledError:
            log.debug("the residual was not written: this worker leaves")
        except ShardyardError as error:
            log.warning("the residual was not written, or another worker's not added: %s", error.what)
        finally:
            with self._lock:
                self._busy = self._adding = False

    # ---- saving

    def _save(self, number: int, url: str) -> None:
        caller = common_messages.caller_to_wire(self._session.caller)
        report = wire.ReportResidualRequest(caller=caller, number=number, stage=wire.FEEDBACK_STAGE_READY)
        try:
            with self._session.wait_registry.over(lambda: f"all workers to be ready for checkpoint {number}"):
                while not self._leaving and not self._report(report).copy:
                    time.sleep(READY_AGAIN_MS / 1000)
            state = self._copy(number)
            if state is None:
                return
            if any(values.any() for values in state.values()):
                report.stage = wire.FEEDBACK_STAGE_COPIED
                self._report(report)
                self._write(number, url, state, report)
            report.stage = wire.FEEDBACK_STAGE_ENDED
            self._report(report)
        except NotFound as error:
            log.info("the residual is not in checkpoint %d: %s", number, error.what)

    def _report(self, report: wire.ReportResidualRequest) -> wire.ReportResidualReply:
        return self._session.ask(methods.REPORT_RESIDUAL, report, check=self._check)

    def _copy(self, number: int) -> State | None:
        """A copy of the state between two pushes; None if the worker leaves."""

        def copy() -> State | None:
            if self._leaving:
                return None
            self._copied = number
            return self._feedback.state_dict()

        copied = self.boundary.when_free(copy)
        with self._session.wait_registry.over(lambda: "the push in flight, to save the residual"):
            return copied.result()

    def _write(self, number: int, url: str, state: State, report: wire.ReportResidualRequest) -> None:
        """Writes the state, and reports the outcome in `report`."""
        name = worker_name(self._session.caller.incarnation)
        try:
            with self._session.wait_registry.over(lambda: f"the residual to be written to {url}"):
                library = self._library(url)
                written = library.write_feedback(self._session.job_settings.name, number, name, state).file.written
        except ShardyardError as error:
            log.warning("the residual is not in checkpoint %d: %s", number, error.what)
            report.failure = error.what[: limits.TEXT_CHARACTERS_MAX]
        else:
            report.length, report.sha256 = written.nbytes, bytes.fromhex(written.sha256)

    # ---- restoring and adding

    def follow(self, reply: wire.RegisterVariablesReply) -> None:
        """Call it before the first push under the reply's map. Restores this worker's state if the job has gone back to
        a checkpoint, and adds residuals of workers that are gone. Raises the job's failure."""
        if not reply.feedback and reply.restored_generation <= self._restores:
            return
        self._following = True
        try:
            if reply.restored_generation > self._restores:
                self._restore([each for each in reply.feedback if each.own])
                self._restores = reply.restored_generation
            for handed in reply.feedback:
                if not handed.own:
                    self._add(handed)
        finally:
            self._following = False

    def _restore(self, own: Iterable[wire.CheckpointResidual]) -> None:
        """Restores this worker's state from the checkpoint to which the job went back, or zeros if that has none."""
        state: State = {}
        for handed in own:
            read, failure = self._read(handed, self._feedback.checked)
            if self._claims(handed, failure):
                state = read or {}
        with self.boundary.held():
            self._feedback.go_back(state)
            self._report_norm()
        log.info("the residual is as it was at the checkpoint" if state else "starts without a residual")

    def _add(self, handed: wire.CheckpointResidual) -> None:
        """Adds the residual of a worker that is gone. A heartbeat and the map's reply may name the same one, in
        different threads; it is added once."""
        with self._reading:
            if (handed.generation, handed.worker) in self._added:
                return
            found, failure = self._read(handed, self._feedback.residuals_in)
            if not self._claims(handed, failure):
                return
            self._added.add((handed.generation, handed.worker))

            def add() -> None:
                self._feedback.absorb(found or {})
                self._report_norm()

            self.boundary.when_free(add)
            log.info("adds the residual of worker %s to its own", handed.worker)

    def _read(self, handed: wire.CheckpointResidual, parse: Callable[[State], R]) -> tuple[R | None, str]:
        """Reads and parses a saved state. Returns it, or None and the error."""
        try:
            with self._session.wait_registry.over(lambda: f"the residual of worker {handed.worker} to be read"):
                library = self._library(handed.url)
                name = self._session.job_settings.name
                return parse(library.load_feedback(name, residual_from_wire(handed), self._layout)), ""
        except ShardyardError as error:
            return None, error.what

    def _library(self, url: str) -> CheckpointLibrary:
        return CheckpointLibrary(encrypted(open_storage(url), keys_in(self._session.settings.storage.key_file)))

    def _claims(self, handed: wire.CheckpointResidual, failure: str) -> bool:
        """Claims the residual. Returns whether this worker has it now, and has read it."""
        taken = claim(self._session, handed, failure, self._check)
        if taken and failure:
            log.warning("the residual of worker %s is lost: %s", handed.worker, failure)
        return taken and not failure

    def _report_norm(self) -> None:
        """Reports the norm that is lost if this process dies now."""
        norm = self._feedback.lost_norm
        self._session.progress.residual_norm = norm if math.isfinite(norm) else 0.0

    # ---- leaving

    def wait_for_checkpoint(self) -> None:
        """Call it before the residual is pushed or given up. Stops saving and adding, and waits for a checkpoint that
        contains the residual. Otherwise a restored job would have the residual twice: pushed, and saved."""
        with self._lock, self.boundary.held():
            self._leaving = True
        give_up = time.monotonic() + CHECKPOINT_WAIT_MS / 1000
        number = self._copied

        def is_over() -> bool:
            return not self._adding and (not number or self._asked != number)

        with self._session.wait_registry.over(lambda: f"checkpoint {number}, which has this worker's residual"):
            while not is_over() and time.monotonic() < give_up:
                time.sleep(CHECKPOINT_AGAIN_MS / 1000)
                self._session.refresh()

    def lose(self) -> None:
        """Call it before this worker leaves a synchronous job. A step has room only for its logical ranks, so the
        residual cannot be pushed. A checkpoint that is being taken still gets it. The norm is reported on leaving; the
        coordinator decides whether the residual is lost: it is not if the job takes no more steps."""
        self.wait_for_checkpoint()
        with self.boundary.held():
            norm = self._feedback.lost_norm
        self._session.progress.residual_lost = norm if math.isfinite(norm) else sys.float_info.max

    def close(self) -> None:
        """Ends the thread, and cancels work that it has not begun."""
        with self._lock:
            self._closed = True
        self.boundary.close()
        if self._thread is not None:
            with self._session.wait_registry.over(lambda: "the residual to be written"):
                self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        if self._closed:
            raise CancelledError
        self._session.check()


def claim(
    session: Session, handed: wire.CheckpointResidual, failure: str, check: Callable[[], None] | None = None
) -> bool:
    """Tells the coordinator that this worker has read a residual, or why it could not (`failure`). Returns whether the
    residual now belongs to this worker."""
    request = wire.TakeUpResidualRequest(
        caller=common_messages.caller_to_wire(session.caller),
        generation=handed.generation,
        worker=handed.worker,
        failure=failure[: limits.TEXT_CHARACTERS_MAX],
    )
    return session.ask(methods.TAKE_UP_RESIDUAL, request, check=check).taken


def refuse(session: Session, reply: wire.RegisterVariablesReply) -> None:
    """For a job that no longer has error feedback: claims a checkpoint's residuals, so that they count as lost."""
    for handed in reply.feedback:
        log.warning("the residual of worker %s is lost: this job compresses without error feedback", handed.worker)
        claim(session, handed, "the job compresses without error feedback now")


def _log_failure(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.error("the residual was not saved, or another worker's not added", exc_info=error)
