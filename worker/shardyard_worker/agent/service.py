"""The Agent service: starts, watches, stops and describes launches over gRPC.

Owns: the launches of an agent, the checks of requests, the certificates of its processes. Invariant: the latest few
ended launches are kept. Must not know: how processes are supervised (supervision, launch), the coordinator, who may
call (shardyard.security.roles).
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from shardyard.config.configuration import RUN_ID_VARIABLE
from shardyard.config.settings import AgentSettings
from shardyard.domain import errors, limits
from shardyard.runtime.restart_policy import GivenUp, RestartPolicy
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.credentials import Pem, write_credentials
from shardyard.security.identity import Role
from shardyard.security.local import FOLDER as IDENTITY
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent import launch_folders
from shardyard_worker.agent.allowed import Allowed
from shardyard_worker.agent.environment import LaunchOrder, gpus_present, gpus_to_give, run_id_of
from shardyard_worker.agent.launch import RunningLaunch
from shardyard_worker.agent.launch_folders import AgentFolders, Ending, LaunchFolder, LaunchRecord
from shardyard_worker.agent.output_files import KeptLine, read_output
from shardyard_worker.agent.supervision import STOP_GRACE_MS

log = logging.getLogger("shardyard.agent")

LAUNCHES_RUNNING_MAX: Final = 16
RESTARTS_MAX: Final = 1_000
GRACE_MS_MAX: Final = 60_000
ARGUMENTS_MAX: Final = 4_096
BLOCK_CHARACTERS_MAX: Final = limits.MIB
"""Characters of all arguments, or of the whole environment, of a launch."""
WATCH_SLICE_MS: Final = 200
LATE_S: Final = 5.0
"""How much longer than its grace time the end of a launch may take."""
END_POLL_S: Final = 0.02
LAST_EVENTS_MS: Final = 1_000
"""How long an agent that ends waits for those who watch its launches."""
STREAMS_MAX: Final = 48
"""Callers who watch launches or follow output at a time, so that other calls are still served."""


@dataclass(frozen=True)
class AgentPlan:
    """How an agent was started. `state`: the folder in which it keeps its launches. `device` and `threads` are the
    settings of these names (section worker)."""

    coordinator: str
    workers: int
    state: Path
    device: str = "auto"
    threads: int = 1
    allowed: Allowed = field(default_factory=lambda: Allowed(AgentSettings()))
    certify: Callable[[str, str], Pem | None] = lambda *_: None
    """Makes a certificate for the processes of a launch. Its arguments name the launch and its owner. Raises what the
    coordinator answers. None: the yard runs without TLS."""


class AgentService:
    """`incarnation` returns the agent's current one. `report_exit(pid, exit_code)` is called for every process that
    ends."""

    def __init__(
        self, plan: AgentPlan, *, incarnation: Callable[[], int], report_exit: Callable[[int, int], object]
    ) -> None:
        self._plan = plan
        self._incarnation = incarnation
        self._report_exit = report_exit
        self._lock = threading.Lock()
        self._launches: dict[int, RunningLaunch] = {}
        self._closed = False
        self._has_resumed = False
        self._folders = AgentFolders(plan.state)
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self.wait_registry = WaitRegistry(logger=log)
        """Explains all waits of this agent, in its log and to the coordinator."""
        self.service = Service("Agent")
        self.service.on(methods.LAUNCH, self._on_launch)
        self.service.on(methods.WATCH, self._on_watch)
        self.service.on(methods.READ_OUTPUT, self._on_read_output)
        self.service.on(methods.STOP, self._on_stop)
        self.service.on(methods.DESCRIBE_AGENT, self._on_describe)

    def launch(self, request: wire.LaunchRequest) -> RunningLaunch:
        """Starts a launch, unless the same request has started it before. Raises InvalidRequest, TooLarge, NotReady,
        StorageUnavailable, CoordinatorUnavailable."""
        order = self._order(request)
        with self._lock:
            known = self._known(order)
        if known is not None:
            return known
        pem = self._plan.certify(order.run_id, request.owner)
        with self._lock:
            known = self._known(order)
            if known is not None:
                return known
            if self._closed:
                raise errors.NotReady("the agent is stopping", todo="start it again")
            if sum(not launch.events.ended for launch in self._launches.values()) >= LAUNCHES_RUNNING_MAX:
                raise errors.NotReady(f"the agent runs {LAUNCHES_RUNNING_MAX} launches already, as many as it takes")
            self._forget()
            request.environment[RUN_ID_VARIABLE] = order.run_id  # it is the same launch when it is resumed
            kept = base64.b64encode(request.SerializeToString()).decode() if request.unattended else ""
            launch = self._begin(order, kept, pem)
            self._launches[launch.number] = launch
            launch.start()
        log.info("launch %d: %s in %d processes", launch.number, order.script, order.workers)
        return launch

    def _known(self, order: LaunchOrder) -> RunningLaunch | None:
        """The launch that the same request has started before."""
        return next((each for each in self._launches.values() if order.key and each.order.key == order.key), None)

    def resume(self) -> None:
        """Launches again what nobody else launches again after the agent before this one was killed or has left. Call
        it once, when the agent has enrolled."""
        for folder, record in self._folders.take_lost():
            try:
                launch = self._resumed(folder, record)
            except errors.ShardyardError as error:
                log.error("launch %d is not started again: %s", record.number, error.what)
                with contextlib.suppress(OSError):
                    folder.end(replace(record, ended=Ending(time.time(), 1, 0, error.what), request=""))
                continue
            with self._lock:
                self._launches[launch.number] = launch
                launch.start()
            what = "has left" if record.left else "was killed"
            log.warning("launch %d is started again, since its agent %s", launch.number, what)
        self._has_resumed = True

    def _resumed(self, folder: LaunchFolder, record: LaunchRecord) -> RunningLaunch:
        """Raises what is wrong with the launch now, and Unavailable if it was resumed too often after its agent was
        killed."""
        order = self._order(_decoded(record.request))
        now_s = time.time()
        budget = RestartPolicy(
            restarts_max=order.restarts_max, window_ms=order.restarts_window_ms, setting="yard.restarts_max"
        )
        for resumed_s in record.resumed_s:
            budget.died("agent", int(1000 * resumed_s))
        decided = None if record.left else budget.died("agent", int(1000 * now_s))
        if isinstance(decided, GivenUp):
            raise errors.Unavailable(f"its agent was killed, and {decided.why}")
        kept = [each for each in record.resumed_s if each > now_s - order.restarts_window_ms / 1000]
        record = replace(record, resumed_s=(*kept, now_s))
        with contextlib.suppress(OSError):
            folder.write(replace(record, left=False))
        return self._running(record, folder, order, self._plan.certify(order.run_id, record.owner))

    def _begin(self, order: LaunchOrder, request: str, pem: Pem | None) -> RunningLaunch:
        begun_s = time.time()

        def describe(number: int) -> LaunchRecord:
            return LaunchRecord(
                number, str(order.script), order.arguments, order.workers, begun_s, request=request, owner=order.owner
            )

        try:
            folder = self._folders.create(describe)
        except OSError as error:
            raise errors.StorageUnavailable(
                f"there can be no folder for the launch in {self._plan.state}, nor in {tempfile.gettempdir()}: "
                f"{error.strerror}",
                todo="see the free space of these disks, or start the agent with another folder (--state)",
            ) from error
        return self._running(describe(int(folder.path.name)), folder, order, pem)

    def _running(
        self, record: LaunchRecord, folder: LaunchFolder, order: LaunchOrder, pem: Pem | None
    ) -> RunningLaunch:
        if pem is not None:
            identity = (folder.path / IDENTITY).absolute()
            try:
                write_credentials(identity, pem)
            except OSError as error:
                raise errors.StorageUnavailable(
                    f"the certificate of launch {record.number} cannot be written to {identity}: {error.strerror}"
                ) from error
            order = replace(order, identity=str(identity))
        return RunningLaunch(record, folder, order, report_exit=self._report_exit, wait_registry=self.wait_registry)

    def leave(
        self, grace_ms: int, launch_elsewhere: Callable[[wire.LaunchRequest], str], hurry: threading.Event
    ) -> None:
        """The agent leaves in order, before `close`: the processes of all launches do, or are killed once `hurry` is
        set. What nobody follows is launched by `launch_elsewhere`, which returns which launch that is; or, if it
        returns nothing, by the next agent on the same folder."""
        for launch in self._stop_all(grace_ms, hurry, agent_leaves=True):
            if launch.record.left and not hurry.is_set():
                launch.hand_over(partial(launch_elsewhere, _decoded(launch.record.request)))

    def close(self, grace_ms: int = STOP_GRACE_MS) -> None:
        """Stops all launches, waits for them and for those who watch them, accepts no new ones."""
        self._stop_all(grace_ms, threading.Event(), agent_leaves=False)
        self._await_streams()
        self.wait_registry.close()
        self._folders.close()

    def _stop_all(self, grace_ms: int, hurry: threading.Event, *, agent_leaves: bool) -> list[RunningLaunch]:
        with self._lock:
            self._closed = True
            launches = list(self._launches.values())
        for launch in launches:
            if not agent_leaves:
                launch.forgo()
            launch.stop(grace_ms, agent_leaves=agent_leaves)
        self._await_ends(launches, time.monotonic() + grace_ms / 1000 + LATE_S, hurry)
        return launches

    def _await_ends(self, launches: list[RunningLaunch], give_up: float, hurry: threading.Event) -> None:
        """Waits for launches that were stopped."""
        hurried = False

        def running() -> list[RunningLaunch]:
            return [launch for launch in launches if not launch.is_over]

        with self.wait_registry.over(
            lambda: ", ".join(f"the {each.running} processes of launch {each.number}" for each in running()) + " to end"
        ):
            while running() and time.monotonic() < give_up:
                if hurry.wait(END_POLL_S) and not hurried:
                    hurried = True
                    for launch in launches:
                        launch.stop(0, agent_leaves=True)
        for launch in running():
            log.error("launch %d has not ended in time", launch.number)

    def _await_streams(self) -> None:
        """Waits until those who watch have the last events."""
        give_up = time.monotonic() + LAST_EVENTS_MS / 1000
        for _ in range(STREAMS_MAX):
            self._streams.acquire(timeout=max(0.0, give_up - time.monotonic()))

    def _forget(self) -> None:
        ended = [number for number, launch in self._launches.items() if launch.events.ended]
        for number in ended[: max(0, len(ended) - launch_folders.ENDED_MAX + 1)]:
            del self._launches[number]

    def _order(self, request: wire.LaunchRequest) -> LaunchOrder:
        plan = self._plan
        workers = request.workers or plan.workers
        if workers > limits.LAUNCH_WORKERS_MAX:
            raise errors.TooLarge(f"{workers} workers; at most {limits.LAUNCH_WORKERS_MAX} are launched")
        if request.restarts_max > RESTARTS_MAX:
            raise errors.TooLarge(f"{request.restarts_max} restarts; at most {RESTARTS_MAX} are allowed")
        if request.restarts_max and not request.restarts_window_ms:
            raise errors.InvalidRequest("restarts without a time within which they are counted")
        script = _path(request.script, "the script")
        if not script.is_file():
            raise errors.InvalidRequest(
                f"the script {script} is not a file on the agent's machine",
                todo="check the path on that machine",
            )
        plan.allowed.check_script(script)
        folder = _path(request.working_directory, "the working directory")
        if not folder.is_dir():
            raise errors.InvalidRequest(f"the working directory {folder} is not a folder on the agent's machine")
        if len(request.arguments) > ARGUMENTS_MAX:
            raise errors.TooLarge(f"{len(request.arguments)} arguments; at most {ARGUMENTS_MAX} are taken")
        _bounded(list(request.arguments), "the arguments")
        given = _environment(dict(request.environment))
        plan.allowed.check_variables(given)
        environment = {**os.environ, **given}
        return LaunchOrder(
            script=script,
            arguments=tuple(request.arguments),
            working_directory=folder,
            environment=environment,
            workers=workers,
            restarts_max=request.restarts_max,
            restarts_window_ms=request.restarts_window_ms,
            threads=plan.threads,
            gpus=gpus_to_give(environment, plan.device, gpus_present()),
            coordinator=plan.coordinator,
            agent=self._incarnation(),
            run_id=request.environment.get(RUN_ID_VARIABLE) or run_id_of(os.environ),
            key=request.key,
            owner=request.owner,
        )

    def _find(self, number: int) -> RunningLaunch:
        with self._lock:
            launch = self._launches.get(number)
        if launch is None:
            folder = None if self._has_resumed else self._folders.find(number)
            record = None if folder is None else folder.record()
            if record is not None and record.request and record.ended is None:
                raise errors.NotReady(f"launch {number} is about to be started again", todo="ask again in a moment")
            raise _unknown(number)
        return launch

    def _on_launch(self, request: wire.LaunchRequest, context: Context) -> wire.LaunchReply:
        if not self._incarnation():
            raise errors.NotReady("the agent has not registered yet", todo="ask again in a moment")
        request.owner = _owner_of(request, context)
        launch = self.launch(request)
        return wire.LaunchReply(launch=launch.number, workers=launch.order.workers)

    def _on_watch(self, request: wire.WatchRequest, context: Context) -> Iterator[wire.LaunchEvent]:
        launch = self._find(request.launch)
        _check_owner(launch.record, context)
        wanted = request.next_event
        with self._stream():
            while context.is_active():
                found = launch.events.after(wanted, wait_ms=WATCH_SLICE_MS)
                for event in found:
                    yield event
                    wanted = event.number + 1
                    if event.HasField("ended"):
                        return
                if not found and launch.events.ended:
                    return

    def _on_read_output(self, request: wire.ReadOutputRequest, context: Context) -> Iterator[wire.OutputLines]:
        folder = self._folders.find(request.launch)
        record = None if folder is None else folder.record()
        if folder is None or record is None:
            raise _unknown(request.launch)
        _check_owner(record, context)
        one = request.process if request.HasField("process") else None
        processes = processes_meant(record.number, record.workers, one)
        tail = request.tail if request.HasField("tail") else None
        running = (lambda: folder.runs) if request.follow else None
        with self._stream():
            for lines in read_output(folder.path, processes, tail=tail, running=running, pause_s=WATCH_SLICE_MS / 1000):
                if not context.is_active():
                    return
                if lines:
                    yield wire.OutputLines(lines=map(output_of, lines))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        if not self._streams.acquire(blocking=False):
            raise errors.NotReady(f"{STREAMS_MAX} callers watch launches of this agent already, as many as it serves")
        try:
            yield
        finally:
            self._streams.release()

    def _on_stop(self, request: wire.StopRequest, context: Context) -> wire.StopReply:
        if request.grace_ms > GRACE_MS_MAX:
            raise errors.TooLarge(f"a grace time of {request.grace_ms} ms; at most {GRACE_MS_MAX} ms are given")
        launch = self._find(request.launch)
        _check_owner(launch.record, context)
        launch.forgo()
        launch.stop(request.grace_ms or STOP_GRACE_MS)
        return wire.StopReply()

    def _on_describe(self, request: wire.DescribeAgentRequest, context: Context) -> wire.DescribeAgentReply:
        del request
        with self._lock:
            ours = dict(self._launches)
        described = []
        for folder, record in self._folders.records():
            launch = ours.get(record.number)
            # an agent on the same folder describes what it runs itself
            if (launch is not None or not folder.runs) and _may_see(record, context):
                described.append(describe(record, launch))
        return wire.DescribeAgentReply(workers=self._plan.workers, launches=described)


def _owner_of(request: wire.LaunchRequest, context: Context) -> str:
    """Whose a launch is: that of the person that asks, or what an agent says that hands it over."""
    if context.speaker is None:
        return ""
    caller = context.speaker.identity
    return request.owner if caller.role is Role.AGENT else caller.owner


def _may_see(record: LaunchRecord, context: Context) -> bool:
    return context.speaker is None or context.speaker.identity.may_touch(record.owner)


def _check_owner(record: LaunchRecord, context: Context) -> None:
    """Raises NotPermitted if a launch is of another owner than the caller."""
    if not _may_see(record, context):
        raise errors.NotPermitted(f"launch {record.number} is another's", todo="")


def _decoded(request: str) -> wire.LaunchRequest:
    """The request of a record. Raises InvalidRequest."""
    try:
        return wire.LaunchRequest.FromString(base64.b64decode(request))
    except (ValueError, DecodeError) as error:
        raise errors.InvalidRequest(f"its record is damaged: {error}") from error


def _unknown(number: int) -> errors.NotFound:
    return errors.NotFound(f"no launch {number}", why="the agent has restarted since, or has forgotten it")


def describe(record: LaunchRecord, launch: RunningLaunch | None) -> wire.DescribedLaunch:
    """`launch`: None if this process does not run it."""
    runs = launch is not None and not launch.events.ended
    said = wire.DescribedLaunch(
        launch=record.number,
        script=record.script,
        workers=record.workers,
        started_s=record.started_s,
        ended=not runs,
    )
    if launch is not None and runs:
        said.running, said.next_event = launch.running, launch.events.next_number
        said.pids.extend(launch.pids)
    elif record.ended is not None:
        ended = record.ended
        said.ended_s = ended.time_s
        said.ending.stopped = ended.stopped
        said.ending.exit_code, said.ending.first_error_index = ended.exit_code, ended.first_error_index
        said.ending.first_error = ended.first_error
    return said


def processes_meant(launch: int, workers: int, one: int | None) -> Sequence[int]:
    """All processes of a launch, or the one that is named. Raises InvalidRequest."""
    if one is None:
        return range(workers)
    if one >= workers:
        raise errors.InvalidRequest(f"launch {launch} has no process {one}; it has {workers}, counted from 0")
    return [one]


def output_of(kept: KeptLine) -> wire.ProcessOutput:
    return wire.ProcessOutput(
        local_index=kept.index,
        standard_error=kept.kind != "out",
        line=kept.text,
        time_s=kept.time_s,
        by_agent=kept.kind == "agt",
    )


def _path(given: str, what: str) -> Path:
    common_messages.text(given, what)
    if not os.path.isabs(given):
        raise errors.InvalidRequest(f"{what} is {given!r}; expected an absolute path on the agent's machine")
    return Path(given)


def _environment(given: dict[str, str]) -> dict[str, str]:
    for name in sorted(given):
        if not name or "=" in name:
            raise errors.InvalidRequest(f"{name!r} cannot be the name of an environment variable")
    _bounded([*given, *given.values()], "the environment")
    return given


def _bounded(texts: list[str], what: str) -> None:
    if any("\0" in text for text in texts):
        raise errors.InvalidRequest(f"{what} of a launch cannot contain a zero character")
    characters = sum(map(len, texts))
    if characters > BLOCK_CHARACTERS_MAX:
        raise errors.TooLarge(f"{what} of a launch have {characters} characters; at most {BLOCK_CHARACTERS_MAX}")
