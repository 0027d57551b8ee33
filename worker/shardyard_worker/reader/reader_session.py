"""A reader's connection to the coordinator: which job it follows, the job's state, and the reports that it sends.

A reader is not a member: it has no incarnation, takes no work, and no process waits for it, so it needs no fence. It
sends a random name every second, by which the coordinator knows it. What it holds on servers has leases of its own.

Owns: the thread that asks. Invariants: reports are sent in order, each until it is accepted; if the coordinator does
not answer, the reader waits at most the grace time. Must not know: values, servers, what is evaluated.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shardyard.domain import errors
from shardyard.domain.ids import JobId
from shardyard.runtime.waits import ExplainedWait, WaitRegistry
from shardyard.transport.enrolment import Renewal
from shardyard.transport.error_codes import from_detail
from shardyard.transport.interfaces import Network
from shardyard.wire import common_messages, layout_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.reader.pinned_version import View

log = logging.getLogger("shardyard.evaluator")

ASK_MS: Final = 1_000
TRY_AGAIN_MS: Final = 500
LOOK_AGAIN_MS: Final = 200
CALL_TIMEOUT_MS: Final = 3_000
REPORT_LAST_MS: Final = 5_000
"""How long a reader that leaves tries to send its last reports."""
REPORTS_MAX: Final = 256
"""Reports that wait while the coordinator is away. If there are more, the oldest are dropped."""


@dataclass(frozen=True)
class JobNews:
    """The coordinator's last reply. `view`: None while there are no values to read. `url`: of the job's checkpoints;
    empty if it has none."""

    state: wire.JobState
    failure: errors.ShardyardError | None
    view: View | None
    url: str

    @property
    def has_ended(self) -> bool:
        return self.state in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED)


class ReaderSession:
    """`job`: the number of a run; 0: the current or next run of the name. Call `begin` first, `close` last."""

    def __init__(self, network: Network, coordinator: str, *, job: JobId, name: str, grace_ms: int) -> None:
        self._network = network
        self._peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._renewal = Renewal(self._peer)
        self._reader = secrets.token_bytes(16)
        self._grace_ms = grace_ms
        self._changed = threading.Condition()
        self._news: JobNews | None = None
        self._asked = 0
        self._lost: errors.ShardyardError | None = None
        self._reports: deque[wire.ReportEvaluationRequest] = deque(maxlen=REPORTS_MAX)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._known_layout: View | None = None
        self.wait_registry = WaitRegistry(logger=log)
        self.job = job
        self.name = name

    def begin(self) -> None:
        """Waits until there is such a job. Waits for the coordinator at most its grace time. Raises
        CoordinatorUnavailable, InvalidRequest, NotFound for a number that the coordinator does not know."""
        silent_since: float | None = None
        last = ""
        with ExplainedWait(lambda: f"job {self.name or 'of any name'} to begin{last}", logger=log) as wait:
            while True:
                try:
                    self._ask()
                    break
                except errors.NotFound:
                    if self.job:
                        raise
                    silent_since = None
                except errors.NotReady as error:
                    silent_since, last = None, f" ({error.what})"
                except errors.Unavailable as error:
                    now = time.monotonic()
                    silent_since = now if silent_since is None else silent_since
                    if (now - silent_since) * 1000 >= self._grace_ms:
                        raise
                    last = f" ({error.what})"
                wait.tick()
                time.sleep(LOOK_AGAIN_MS / 1000)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def news(self) -> JobNews:
        """The last news. If the coordinator was lost before the job ended, raises that error."""
        with self._changed:
            assert self._news is not None, "not begun"
            if self._lost is not None and not self._news.has_ended:
                raise self._lost.anew()
            return self._news

    def wait(self, until: float, over: Callable[[JobNews], bool] = lambda _: False) -> JobNews:
        """Waits until `until` (time.monotonic), the job has ended, or `over` is true. Returns the last news."""
        while True:
            news = self.news
            left = until - time.monotonic()
            if left <= 0 or news.has_ended or over(news):
                return news
            with self._changed:
                self._changed.wait(min(left, LOOK_AGAIN_MS / 1000))

    def ongoing(self) -> JobNews:
        """As `news`, but raises the job's failure too."""
        news = self.news
        if news.failure is not None:
            raise news.failure
        return news

    def wait_for_news(self, news: JobNews) -> None:
        """Waits a little, or until there is newer news."""
        self.wait(time.monotonic() + TRY_AGAIN_MS / 1000, lambda now: now is not news)
        if news.has_ended:
            time.sleep(LOOK_AGAIN_MS / 1000)

    def report(self, step: int, metrics: Mapping[str, float], best: wire.BestModel | None = None) -> None:
        """Reports an evaluation. Returns at once. Metrics that are not finite are left out."""
        shown = [wire.Metric(name=name, value=value) for name, value in metrics.items() if math.isfinite(value)]
        with self._changed:
            self._reports.append(wire.ReportEvaluationRequest(job=self.job, step=step, metrics=shown, best=best))

    def close(self) -> None:
        """Sends the reports that are left, and says that this reader leaves. A second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CALL_TIMEOUT_MS / 1000 + 1)
        try:
            if self._news is not None:
                self._report_last()
        finally:
            self.wait_registry.close()
            self._peer.close()

    # ---- the thread

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._stop.wait(ASK_MS / 1000):
            try:
                self._ask()
                self._send_reports()
                answered = time.monotonic()
            except errors.NotReady as error:
                # an answer: the coordinator is there, and waits itself, as for the disk of its journal
                answered = time.monotonic()
                log.debug("asked again soon: %s", error.what)
            except errors.Unavailable as error:
                if (time.monotonic() - answered) * 1000 >= self._grace_ms:
                    self._lose(errors.CoordinatorLost(f"{self._peer.name} has not answered: {error.what}"))
                    return
            except errors.ShardyardError as error:
                self._lose(error)
                return
            except Exception as error:
                # a defect here must not look as if the job trained on
                log.exception("the job is not followed any more")
                self._lose(errors.Internal(f"the job is not followed any more: {type(error).__name__}: {error}"))
                return

    def _lose(self, error: errors.ShardyardError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def _ask(self) -> None:
        known = self._known_layout
        request = wire.FollowJobRequest(job=self.job, job_name=self.name, reader=self._reader, layout=known is None)
        with self.wait_registry.over(lambda: f"the {self._peer.name} to say where the job stands"):
            reply = self._peer.call(methods.FOLLOW_JOB, request, timeout_ms=CALL_TIMEOUT_MS)
        self.job, self.name = JobId(reply.job), reply.job_name
        self._network.job_pass = reply.job_pass
        self._renewal.look(reply.authorities)
        layout = known.layout if known is not None else None
        if layout is None and reply.HasField("layout"):
            layout = layout_messages.layout_from_wire(reply.layout)
        view = None
        if layout is not None and reply.HasField("map"):
            map_ = layout_messages.map_from_wire(reply.map)
            if len(map_.owners) != len(layout.partitions):
                raise errors.MalformedPayload(f"a map of {len(map_.owners)} partitions; {len(layout.partitions)} are")
            ended = reply.state == wire.JOB_STATE_FINISHED
            view = View(self.job, common_messages.UPDATE_MODES.from_wire(reply.mode), map_, layout, ended)
            self._known_layout = view
        failure = from_detail(reply.failure) if reply.HasField("failure") else None
        with self._changed:
            self._news = JobNews(reply.state, failure, view, common_messages.text(reply.url, "the URL of checkpoints"))
            self._changed.notify_all()

    def _send_reports(self) -> None:
        """Sends the reports that wait. Raises Unavailable. A report that is refused is logged."""
        while True:
            with self._changed:
                if not self._reports:
                    return
                request = self._reports[0]
            try:
                with self.wait_registry.over(lambda: f"the {self._peer.name} to take an evaluation"):
                    self._peer.call(methods.REPORT_EVALUATION, request, timeout_ms=CALL_TIMEOUT_MS)
            except (errors.Unavailable, errors.NotReady):
                raise
            except errors.ShardyardError as error:
                log.warning("the coordinator does not take the evaluation of step %d: %s", request.step, error.what)
            with self._changed:
                if self._reports and self._reports[0] is request:
                    self._reports.popleft()

    def _report_last(self) -> None:
        until = time.monotonic() + REPORT_LAST_MS / 1000
        goodbye = wire.FollowJobRequest(job=self.job, reader=self._reader, leaves=True)
        while True:
            try:
                self._send_reports()
                with self.wait_registry.over(lambda: f"the {self._peer.name} to let this reader go"):
                    self._peer.call(methods.FOLLOW_JOB, goodbye, timeout_ms=CALL_TIMEOUT_MS)
                return
            except errors.Unavailable as error:
                if time.monotonic() >= until:
                    if self._reports:
                        log.warning("%d evaluations were not reported: %s", len(self._reports), error.what)
                    return
                time.sleep(LOOK_AGAIN_MS / 1000)
            except errors.ShardyardError as error:
                log.debug("left without telling the coordinator: %s", error)
                return
