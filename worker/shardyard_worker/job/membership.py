"""A worker's place in a job: what a script asks about the job, how it stops the job, how it leaves it.

Owns: the end of a worker's part in the job. Invariant: a worker leaves once, also when the script ends without `close`.
Must not know: models, gradients, data.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any, Self

import torch

from shardyard.domain.consistency import Stop, UpdateMode
from shardyard.domain.errors import InvalidRequest, ShardyardError
from shardyard.domain.limits import TEXT_CHARACTERS_MAX
from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from shardyard_worker.job.callbacks import Callbacks
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.session.drain import Drained
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.session.job_requests import stop_job
from shardyard_worker.session.metrics import MetricLog
from shardyard_worker.session.session import Session
from shardyard_worker.session.tensorboard import TensorBoardWriter

log = logging.getLogger("shardyard.worker")


class JobMember:
    """What a worker has of a job before it trains. `Job` adds training."""

    def __init__(
        self,
        session: Session,
        device: torch.device,
        metrics: MetricLog,
        files: TensorBoardWriter | None,
        on_close: Callable[[], None] | None,
    ) -> None:
        self.device = device
        """The device that the model should be on."""
        self.name: str = session.settings.job.name
        """The job's name."""
        self.seed: int = session.seed
        """The job's seed. All workers have the same. Until `prepare` or `register` they also draw the same numbers, so
        that all build the same model. From then on each worker draws numbers of its own, from this seed and
        `job.rank`, and in job.batches those of each batch's name."""
        self._session = session
        self._metrics = metrics
        self._files = files
        self._on_close = on_close
        self._callbacks: Callbacks[Any] = Callbacks(self, session.checkpoint)
        self._loop = TrainingLoop(session, metrics, self._callbacks)
        self._closed = False
        atexit.register(self._close_at_exit)

    @property
    def mode(self) -> UpdateMode:
        """Whether updates are synchronous (modes sync, hybrid, local) or asynchronous (async, bounded)."""
        return self._session.mode

    @property
    def step(self) -> int:
        """The number of updates applied, as far as this worker has seen. In local mode: the number of local steps that
        each logical rank has taken so far."""
        return self._loop.step

    @property
    def chief(self) -> bool:
        """True in one worker: the living one that joined first. Use it to evaluate, print and save in one process only.

        If the chief dies, or is told to leave, another worker becomes chief. If its script ends without an error, no
        worker is chief afterwards, so its work is done once.
        """
        return self._session.chief and not self._session.drain.asked

    @property
    def rank(self) -> int:
        """This worker's number among the job's living workers, from 0: for example, to read a part of the data that no
        other worker reads. It is the lowest number that no living worker had when this one joined, and stays the same.
        A worker that joins after another has died takes up that one's number. Logical ranks are something else: the
        parts of a synchronous step, which move between workers."""
        self._loop.own_data.is_divided = True
        return self._session.number

    @property
    def world_size(self) -> int:
        """The number of workers that the job expects (`job.workers_expected`), or one more than the highest `job.rank`
        of a living worker, if that is more. It does not shrink when a worker dies, since another may come in its
        place: until then, nobody reads the part of the data that has its rank."""
        return self._session.world_size

    @property
    def should_stop(self) -> bool:
        """True once the job was told to stop and this worker has no more steps to compute. In a synchronous job all
        workers see it at the same step. Also true once this worker alone is told to leave (`drain`). Ask this in a loop
        of your own; job.batches ends by itself."""
        return self._loop.should_stop or self._session.drain.seen()

    @property
    def stopping(self) -> Stop | None:
        """The `reason`, `worker` and `step` of the stop, if this worker knows of one. Otherwise None."""
        return self._session.step_barrier.stop

    def stop(self, reason: str = "") -> None:
        """Ends the job for all workers before its data ends. Returns at once.

        Asynchronous: the job ends after the current batch. Synchronous: it ends before a step that all workers agree
        on, this worker's next one or the one after. The first call's reason is kept. A last checkpoint is written when
        all workers have left.

        Raises InvalidRequest for a reason that is too long, JobFailed.

        >>> with sy.connect() as job:
        ...     job.stop("the loss is good enough")
        ...     job.should_stop
        True
        """
        if len(reason) > TEXT_CHARACTERS_MAX:
            raise InvalidRequest(f"a reason of {len(reason)} characters; at most {TEXT_CHARACTERS_MAX}")
        self._session.check()
        with INTERRUPTS:
            stop_job(self._session, reason)

    def drain(self) -> None:
        """Lets this worker leave in order, as SIGTERM does: the others continue its work. Returns at once. For a script
        that handles signals itself.

        job.batches hands back what is not pushed, and ends the script with exit code 143; `with` and `finally` blocks
        run. A loop of your own sees `should_stop`. See docs/guides/stopping.md.
        """
        self._session.drain.begin("the script asks for it")

    def close(self, error: str = "") -> None:
        """Leaves the job. A second call does nothing. `error`: why the script failed, if it did. As the end of a `with`
        block, it ends the script with exit code 143 if this worker was told to leave before its work was done."""
        if not self._closed:
            self._close(error)
            on_its_way = sys.exc_info()[0]  # in a `finally` block
            if not error and on_its_way is None and self._session.drain.is_silent:
                self._session.drain.end_script()

    def _close(self, error: str, *, lost: bool = False) -> None:
        """`lost`: the script failed because this process has lost the yard."""
        if self._closed:
            return
        self._session.drain.leave()
        with INTERRUPTS:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            try:
                self._loop.finish(error)
            except ShardyardError as failure:
                error, lost = error or f"{failure.code}: {failure}", lost or failure.new_process_helps
                raise
            finally:
                files, self._files = self._files, None
                if files is not None:
                    files.close()
                self._loop.at_end.close()
                if self._loop.trainer is not None:
                    self._loop.trainer.close()
                self._session.leave(error, lost=lost)
                if self._on_close is not None:
                    self._on_close()

    def _close_at_exit(self) -> None:
        """Leaves the job of a script without `with`. At exit Python still has the script's error, if there was one."""
        error = getattr(sys, "last_value", None)
        if error is None and self._session.drain.is_silent:
            log.warning(
                "leaves before its work is done, but the script ends with exit code 0, as if it were: end it with "
                "job.close(), or use `with shardyard.connect() as job:`; it has exit code %d then",
                LEFT_IN_ORDER,
            )
        self._close_by(error)

    def _close_by(self, error: BaseException | None) -> None:
        """Leaves the job after a script that ended by this error."""
        lost = isinstance(error, ShardyardError) and error.new_process_helps
        self._close("" if error is None else f"{type(error).__name__}: {error}", lost=lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close_by(None if isinstance(error, Drained) else error)
        if error is None:
            self._session.drain.end_script()

    def __repr__(self) -> str:
        return f"<Job {self.name!r}, {self.mode.value}, step {self.step:,}, {self._state}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        stop = self.stopping
        rows = [
            ("state", self._state),
            ("worker", f"{self._session.caller.incarnation}{' (chief)' if self.chief else ''}"),
            ("mode", self.mode.value),
            ("step", f"{self.step:,}"),
            ("device", str(self.device)),
            *[(name, f"{float(value):.6g}") for name, value in self._metrics.latest.items()],
            *([] if stop is None else [("told to stop", stop.reason or "without a reason")]),
        ]
        left = '<{0} style="text-align: left">{1}</{0}>'
        # names and reasons are escaped, so that they are never read as markup
        cells = [left.format("th", escape(name)) + left.format("td", escape(value)) for name, value in rows]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><caption>{escape(f'job {self.name}')}</caption><tbody>{body}</tbody></table>"

    @property
    def _state(self) -> str:
        if self._closed:
            return "left"
        return "no variables yet" if self._loop.trainer is None else "training"
