"""No wait of the shipped code is a mystery: each stands under a wait that is explained, or in the list below with the
reason why it need not (docs/reference/waits.md). A new one that does neither fails here.

What counts as a wait is seen from the source: calls that block, by name. A call under `with ExplainedWait(...)` or
`with ....over(...)` (WaitRegistry) is explained by that, in nested functions too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[4]
PACKAGES: Final = (
    "shardyard",
    "coordinator/shardyard_coordinator",
    "ps_server/shardyard_ps_server",
    "worker/shardyard_worker",
    "launcher/shardyard_launcher",
)
BLOCKING: Final = frozenset(
    {
        "acquire", "check_output", "communicate", "fdatasync", "flock", "fsync", "lockf", "result", "run", "select",
        "shutdown", "sleep", "wait", "wait_for",
    }
)  # fmt: skip
"""Methods and functions that may block, whatever they are called on."""
PEERS: Final = frozenset({"call", "send", "receive"})
"""Methods of a Peer or a Stream: they block where they are given a `timeout_ms`."""
EXPLAINED: Final = frozenset({"ExplainedWait", "over"})

IDLE = "idle: it waits for work, and whoever gives it work waits for the result"
SHORT = "it lasts 5 s at most"
SLICE = "one slice of a wait that its callers explain"
COUNTED = "arithmetic and copies of this process; nobody else is waited for"
OUTSIDE = "the caller explains it"
PROBE = "under the probe's own wait (findings.carry_out), or a doctor's deadline of 3 s"

ENDS_WITH_IT = "until this process is told to stop: that is its work"
NO_WAIT = "a context variable is read"

ALLOWED: Final[dict[str, str]] = {
    "storage/storage.py:_sync_folder:fsync": OUTSIDE,
    "storage/storage.py:_write_through:fsync": OUTSIDE,
    "coordinator/service/checkpoint_io.py:_on_all:ThreadPoolExecutor": OUTSIDE,
    "coordinator/service/checkpoint_io.py:_on_all:result": OUTSIDE,
    "coordinator/service/process.py:serve:wait": ENDS_WITH_IT,
    "coordinator/service/service.py:Coordinator._tick:wait": IDLE,
    "runtime/failpoints.py:_sleep:sleep": "a test has asked for it",
    "launcher/checkpoints/export.py:_write_torch:fsync": "a command at work on a file of its own",
    "launcher/scripts/launches.py:read_output_of:receive": "it reads nothing yet",
    "worker/agent/launch_folders.py:LaunchFolders.create:flock": "nobody knows the file yet",
    "worker/agent/output_files.py:read_output:sleep": "idle: a person follows what a script prints",
    "launcher/yard/local_cluster.py:LocalCluster._record_and_release:wait": "RunningRole.wait explains itself",
    "launcher/yard/local_cluster.py:stop_roles:wait": "RunningRole.wait explains itself",
    "launcher/commands/evaluate.py:_follow:wait": "BACKOFF_MS_MAX at most, and it is said",
    "launcher/commands/evaluate.py:_run:wait": "the script runs, which says itself what it waits for; or it was killed",
    "launcher/probes/machine.py:disk:fsync": PROBE,
    "launcher/probes/machine.py:torch:run": PROBE,
    "launcher/probes/network.py:_members:ThreadPoolExecutor": PROBE,
    "launcher/probes/network.py:_status:call": PROBE,
    "launcher/commands/audit.py:ask:call": "CoordinatorClient.call explains itself",
    "launcher/terminal/coordinator_client.py:CoordinatorClient.status:call": "CoordinatorClient.call explains itself",
    "launcher/terminal/options.py:StopSignals.__exit__:join": "its pipe is closed: it ends at once",
    "launcher/yard/temp_folder.py:run_folder:flock": "nobody else knows the file yet",
    "launcher/scripts/agent_launch.py:AgentLaunch._put:put": "the display takes events, and shows them",
    "launcher/scripts/agent_launch.py:AgentLaunch._watch:receive": "the script runs, and its output is shown",
    "launcher/scripts/agent_launch.py:AgentLaunch._watch:wait": SLICE,
    "launcher/scripts/agent_launch.py:AgentLaunch.close:join": SHORT,
    "launcher/scripts/agent_launch.py:AgentLaunch.launch:wait": SLICE,
    "launcher/scripts/agent_launch.py:AgentLaunch.stop:call": SHORT,
    "launcher/scripts/agent_launch.py:AgentLaunch.take:get": "the script runs, and its output and progress are shown",
    "launcher/scripts/script.py:ScriptRun._show_last:call": SHORT,
    "launcher/scripts/script.py:_StatusPoller._run:call": SHORT,
    "launcher/scripts/script.py:_StatusPoller._run:wait": IDLE,
    "launcher/scripts/script.py:_StatusPoller.close:join": SHORT,
    "launcher/commands/supervisor.py:_serve:wait": ENDS_WITH_IT,
    "ps_server/hosting/thread_pool.py:BatchPool._serve:wait_for": IDLE,
    "ps_server/hosting/thread_pool.py:BatchPool.close:join": COUNTED,
    "ps_server/hosting/thread_pool.py:_Batch.finish:wait": COUNTED,
    "ps_server/hosting/worker_clocks.py:WorkerClocks.await_slower:wait": (
        "PULL_WAIT_MS_MAX at most; then NotYet, explained by workers"
    ),
    "ps_server/partition/partition.py:Partition.wait:wait": SLICE,
    "ps_server/partition/checkpoint_cuts.py:await_named_cut:wait": OUTSIDE,
    "ps_server/partition/reads.py:await_version:wait": "PULL_WAIT_MS_MAX at most; then NotYet, explained by workers",
    "ps_server/partition/reads.py:_await_copies:wait": "PULL_WAIT_MS_MAX at most; then NotReady",
    "ps_server/partition/reads.py:await_pinned:wait": "PULL_WAIT_MS_MAX at most; then NotYet, explained by readers",
    "ps_server/service/process.py:serve:wait": ENDS_WITH_IT,
    "ps_server/service/exchange_stream.py:_job_of:get": NO_WAIT,
    "transport/interfaces.py:UntilPause.wait:sleep": "a job that is held to a rate; the log says so once a minute",
    "transport/dispatch.py:serve:wait": "a pause, until what its handler says; see VersionPause.wait",
    "ps_server/hosting/admission.py:admit:get": NO_WAIT,
    "ps_server/hosting/pulls.py:unpin:get": NO_WAIT,
    "ps_server/hosting/pulls.py:_unopened:sleep": "50 ms",
    "ps_server/jit/cache.py:compiler_lock:flock": OUTSIDE,
    "ps_server/jit/table_warmup.py:TableLoops._compile:communicate": OUTSIDE,
    "ps_server/tables/memory/shared_exclusive.py:SharedExclusiveLock.alone:wait": COUNTED,
    "ps_server/tables/memory/shared_exclusive.py:SharedExclusiveLock.enter:wait": COUNTED,
    "ps_server/wal/wal.py:Wal._begin:fsync": OUTSIDE,
    "ps_server/wal/wal.py:Wal._write:acquire": COUNTED,
    "ps_server/wal/wal.py:Wal._write:fdatasync": OUTSIDE,
    "ps_server/wal/segments.py:LogFiles._find_end:fsync": OUTSIDE,
    "ps_server/wal/segments.py:write_durably:fsync": OUTSIDE,
    "runtime/preemption.py:PreemptionWatch._run:wait": IDLE,
    "runtime/preemption.py:PreemptionWatch.close:join": SHORT,
    "runtime/log.py:bind:get": NO_WAIT,
    "runtime/log.py:context:get": NO_WAIT,
    "runtime/log.py:current_fields:get": NO_WAIT,
    "runtime/waits.py:WaitRegistry._run:wait": IDLE,
    "runtime/waits.py:WaitRegistry.close:join": SHORT,
    "transport/enrolment.py:enrol_launch:call": "ENROL_MS at most, while the caller of Launch waits, who explains it",
    "transport/enrolment.py:invite:call": "a command at work, ENROL_MS at most",
    "transport/enrolment.py:_renew:call": "between two heartbeats, or a command at work, ENROL_MS at most",
    "security/credentials.py:locked:flock": "another process of the folder renews it, ENROL_MS at most",
    "security/credentials.py:replace_file:fsync": OUTSIDE,
    "runtime/durable.py:sync_folder:fsync": OUTSIDE,
    "transport/grpc_client.py:Deadlines._run:wait": IDLE,
    "transport/grpc_client.py:ThreadedCall._requests:get": IDLE,
    "transport/grpc_private.py:ServedCall._run:get": IDLE,
    "transport/grpc_server.py:GrpcServer._end_stalled_calls:wait": IDLE,
    "transport/grpc_private.py:CallThreads._serve:get": IDLE,
    "transport/local_socket.py:Connection.cancel:shutdown": "a socket is shut down at once",
    "transport/local_listener.py:LocalListener._accept:sleep": SHORT,
    "worker/exchange/server_stream.py:ServerStream._open_stream:call": OUTSIDE,
    "transport/grpc_private.py:CallThreads.close:join": OUTSIDE,
    "transport/membership_client.py:MembershipClient._pause:wait": IDLE,
    "transport/membership_client.py:MembershipClient._beat_now:call": SHORT,
    "transport/membership_client.py:MembershipClient.drain:call": (
        "workers and servers explain it; an agent reports in a thread that is waited for 4 s at most"
    ),
    "transport/membership_client.py:MembershipClient.stop:join": SHORT,
    "transport/interfaces.py:next_request_id:get": NO_WAIT,
    "worker/agent/event_log.py:EventLog.after:wait_for": SLICE,
    "worker/agent/launch.py:RunningLaunch._wait:select": IDLE,
    "worker/agent/process.py:AgentMembership.report_exit:call": SHORT,
    "worker/agent/processes.py:ForkServer.close:wait": OUTSIDE,
    "worker/agent/process.py:serve:wait": ENDS_WITH_IT,
    "worker/agent/service.py:AgentService._await_streams:acquire": SHORT,
    "worker/session/departure.py:Departure.close:join": "at once, or with report_drain, which explains itself",
    "worker/session/departure.py:Departure._run:select": IDLE,
    "worker/exchange/optimizer_exchange.py:OptimizerExchange._give:send": OUTSIDE,
    "worker/exchange/optimizer_exchange.py:OptimizerExchange._publish:send": OUTSIDE,
    "worker/exchange/optimizer_exchange.py:OptimizerExchange.is_cut.ask:call": OUTSIDE,
    "worker/collectives/messages.py:Receive.wait:wait": OUTSIDE,
    "worker/collectives/messages.py:_Waiter._run:get": IDLE,
    "worker/collectives/messages.py:_Waiter._run:wait": "a thread of its own, whose caller waits in slices",
    "worker/collectives/messages.py:_Waiter.wait:get": SLICE,
    "worker/collectives/messages.py:Messages.wait:wait": OUTSIDE,
    "worker/collectives/messages.py:Messages.hear:wait": OUTSIDE,
    "worker/collectives/messages.py:Messages.wait:sleep": "for 2 ms",
    "worker/collectives/messages.py:Messages.send:wait": OUTSIDE,
    "worker/collectives/messages.py:Messages.sum_facts:wait": OUTSIDE,
    "worker/collectives/collectives.py:Collectives.check_begun:wait": "the operation has ended",
    "worker/collectives/collectives.py:Collectives.wait:wait": SLICE,
    "worker/collectives/shared_members.py:SharedMembers.wait:sleep": OUTSIDE,
    "worker/collectives/shared_messages.py:SharedMessages.finish:wait": OUTSIDE,
    "worker/collectives/shared_messages.py:SharedMessages.flush:wait": OUTSIDE,
    "worker/collectives/shared_sums.py:SharedSums._finish:wait": OUTSIDE,
    "worker/consistency/groups/replica_strategy.py:ReplicaStrategy._copy_replica:wait": OUTSIDE,
    "worker/consistency/groups/spread.py:SpreadStrategy._sum:wait": OUTSIDE,
    "worker/consistency/groups/spread.py:SpreadStrategy._take_facts:wait": OUTSIDE,
    "worker/consistency/groups/share_parts.py:SharePart.put_values:wait": OUTSIDE,
    "worker/replicas/row_exchange.py:exchange_rows:wait": OUTSIDE,
    "worker/replicas/row_exchange.py:_exchanged:wait": OUTSIDE,
    "worker/consistency/groups/computed_together.py:RunsTogether._loss_of_batch:wait": OUTSIDE,
    "worker/collectives/default_group.py:DefaultGroup.end:wait": "it lasts a millisecond",
    "worker/collectives/default_group.py:_Work.wait:wait": "SpreadStrategy explains what torch waits for",
    "worker/collectives/collectives.py:_free:sleep": "a thread of its own, which nobody waits for",
    "worker/replicas/buffer_means.py:BufferMeans.add_up:wait": OUTSIDE,
    "worker/replicas/gradient_buckets.py:GradientBuckets.await_sums:wait": OUTSIDE,
    "worker/replicas/hooked_buckets.py:PowerSGDBuckets._send_next:wait": OUTSIDE,
    "worker/collectives/hooked_sum.py:HookedSum.wait:sleep": SLICE,
    "worker/replicas/ordered_buckets.py:OrderedBuckets.await_sums:wait": OUTSIDE,
    "worker/exchange/optimizer_exchange.py:OptimizerExchange._read:receive": OUTSIDE,
    "worker/exchange/overlap.py:Overlap._run:get": IDLE,
    "worker/exchange/overlap.py:Overlap.ready.send:wait": "Overlap.drain waits for it, and says so",
    "worker/exchange/buffers/partial_reply.py:PartialReply.await_end:wait_for": OUTSIDE,
    "worker/exchange/buffers/partial_reply.py:PartialReply.wait:wait_for": OUTSIDE,
    "worker/exchange/buffers/tensor_copy.py:TensorCopier.copy:result": COUNTED,
    "worker/exchange/buffers/tensor_copy.py:TensorCopier.close:shutdown": COUNTED,
    "worker/reader/reader_session.py:ReaderSession._run:wait": IDLE,
    "worker/reader/reader_session.py:ReaderSession._report_last:sleep": SHORT,
    "worker/reader/reader_session.py:ReaderSession.close:join": SHORT,
    "worker/reader/reader_session.py:ReaderSession.wait:wait": OUTSIDE,
    "worker/reader/reader_session.py:ReaderSession.wait_for_news:sleep": OUTSIDE,
    "worker/reader/reader_session.py:ReaderSession.wait_for_news:wait": OUTSIDE,
    "worker/reader/evaluator.py:Run.snapshots:wait": "the pause that the script has asked for",
    "worker/reader/pinned_version.py:PinnedVersion._read_rows:receive": OUTSIDE,
    "worker/reader/pinned_version.py:PinnedVersion.look_up.ask:call": OUTSIDE,
    "worker/reader/pinned_version.py:Leases._run:wait": IDLE,
    "worker/reader/pinned_version.py:Leases.close:join": SHORT,
    "worker/reader/pinned_version.py:ViewServers.unpin.release:call": OUTSIDE,
    "worker/job/connect.py:connect:join": "no thread: a job is joined, by calls that are explained",
    "worker/exchange/server_stream.py:ServerStream._assemble:receive": OUTSIDE,
    "worker/exchange/server_stream.py:ServerStream._receive:receive": (
        "who reads a value that has not come waits for it, and says so"
    ),
    "worker/exchange/server_stream.py:ServerStream._take:receive": OUTSIDE,
    "worker/session/retry.py:RetryPolicy.call:sleep": OUTSIDE,
    "worker/exchange/fan_out.py:FanOut._call:result": "all have ended: the wait for them, before, is explained",
    "worker/exchange/fan_out.py:FanOut.pause:wait": SLICE,
    "worker/exchange/row_reads.py:RowReads.count_rows.ask:call": OUTSIDE,
    "worker/exchange/row_reads.py:RowReads.look_up.ask:call": OUTSIDE,
    "worker/exchange/row_reads.py:RowReads.read_rows.ask:receive": OUTSIDE,
    "worker/exchange/server_group.py:ServerGroup._initialize:send": OUTSIDE,
    "worker/exchange/server_group.py:ServerGroup.open_sources.ask:call": OUTSIDE,
    "worker/reader/serving.py:ServedModel._run:wait": IDLE,
    "worker/reader/serving.py:ServedModel.close:join": SHORT,
    "worker/reader/serving.py:ServedModel.close:wait_for": SHORT,
    "worker/reader/snapshots.py:Snapshots._call_all:result": OUTSIDE,
    "worker/reader/snapshots.py:Snapshots._pull:receive": OUTSIDE,
    "worker/reader/snapshots.py:Snapshots.close:shutdown": "nobody reads a snapshot: its threads idle",
    "worker/consistency/asynchronous.py:AsyncStrategy.close:shutdown": "the flight's own exchange is explained",
    "worker/consistency/push_delivery.py:PushDelivery.finish:result": "the flight's own exchange is explained",
}
"""`FILE:FUNCTION:CALL`, and why nobody can be left wondering there."""


def waits_in(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Each unexplained wait: the qualified name of the function, what is called, the line."""
    yield from _walk(tree, "", explained=False)


def _walk(node: ast.AST, scope: str, *, explained: bool) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        inner, covered = scope, explained
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        elif isinstance(child, ast.With):
            for item in child.items:
                yield from _walk(ast.Expression(item.context_expr), scope, explained=explained)
                if _opens_pool(item.context_expr) and not explained:
                    yield scope, "ThreadPoolExecutor", child.lineno
            covered = explained or any(_explains(item.context_expr) for item in child.items)
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), scope, explained=covered)
            continue
        elif isinstance(child, ast.Call) and not explained:
            name = _blocks(child)
            if name:
                yield scope, name, child.lineno
        yield from _walk(child, inner, explained=covered)


def _explains(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and _name(expression.func) in EXPLAINED


def _opens_pool(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and _name(expression.func) == "ThreadPoolExecutor"


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _blocks(call: ast.Call) -> str:
    """The name of a call that may block, else nothing."""
    name = _name(call.func)
    keywords = {keyword.arg for keyword in call.keywords}
    at_once = {("wait", False), ("blocking", False)}
    if any(isinstance(each.value, ast.Constant) and (each.arg, each.value.value) in at_once for each in call.keywords):
        return ""
    if any(isinstance(each, ast.Attribute) and each.attr == "LOCK_NB" for each in ast.walk(call)):
        return ""
    if name in PEERS:
        return name if "timeout_ms" in keywords else ""
    if name == "join":
        return name if _joins_thread(call) else ""
    if name in ("get", "put"):  # of a queue; those of a dictionary are given something to look for
        return name if "timeout" in keywords or (name == "get" and not call.args) else ""
    if name == "run":
        return name if isinstance(call.func, ast.Attribute) and _name(call.func.value) == "subprocess" else ""
    if name == "wait" and isinstance(call.func, ast.Name):
        return name
    return name if name in BLOCKING else ""


def _joins_thread(call: ast.Call) -> bool:
    """A thread is joined without anything, or for a time; texts and paths are given what to join."""
    if not isinstance(call.func, ast.Attribute) or isinstance(call.func.value, ast.Constant | ast.JoinedStr):
        return False
    if any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    if not call.args:
        return True
    (first, *rest) = call.args
    is_time = isinstance(first, ast.BinOp | ast.Constant) or (
        isinstance(first, ast.Call) and _name(first.func) == "max"
    )
    return not rest and is_time


@cache
def unexplained() -> dict[str, list[str]]:
    """All unexplained waits of the shipped code: `file:function:call`, and where."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.endswith("_pb2.py"):
                continue
            where = path.relative_to(ROOT).as_posix()
            for scope, name, line in waits_in(ast.parse(path.read_text(encoding="utf-8"))):
                key = f"{where.partition('/')[2].removeprefix('shardyard_')}:{scope}:{name}"
                found.setdefault(key, []).append(f"{where}:{line}")
    return found


def test_every_wait_is_explained_or_has_a_reason() -> None:
    new = {key: places for key, places in unexplained().items() if key not in ALLOWED}
    assert not new, (
        f"waits that say nothing: {new}; put them under `with wait_registry.over(...)` or ExplainedWait, so that log "
        "and status say what is waited for, or into ALLOWED with the reason"
    )


def test_reasons_are_for_waits_that_are_there() -> None:
    assert ALLOWED.keys() <= unexplained().keys(), sorted(ALLOWED.keys() - unexplained().keys())


def wait_texts() -> Iterator[tuple[str, list[str]]]:
    """Where a wait is explained in words that stand in the code itself, and these words, without what is filled in."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if any(f"{each}(" in text for each in EXPLAINED) else ():
                if not (isinstance(node, ast.Call) and _explains(node) and node.args):
                    continue
                body = node.args[0].body if isinstance(node.args[0], ast.Lambda) else None
                parts = body.values if isinstance(body, ast.JoinedStr) else [body]
                words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                if words:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", [word.strip(" :;,(") for word in words]


def test_every_wait_is_in_the_page_on_waits() -> None:
    page = (ROOT / "docs/reference/waits.md").read_text(encoding="utf-8")
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    found = list(wait_texts())
    assert len(found) > 50
    missing = [
        f"{where}: {' ... '.join(words)}"
        for where, words in found
        if not any(all(word in span for word in words) for span in spans)
    ]
    assert not missing, "docs/reference/waits.md lacks these waits:\n" + "\n".join(missing)


SOURCE = """
class Line:
    def take(self, stream, pool, wait_registry):
        stream.receive(timeout_ms=5)
        with wait_registry.over(lambda: "it"):
            stream.receive(timeout_ms=5)
            with self.lock:
                self.done.wait()
                def inner():
                    self.thread.join()
        with ThreadPoolExecutor(2) as pool:
            pool.submit(print)
        self.thread.join(2 * seconds)
        ", ".join(names)
        os.path.join(a, b)
        self.names.get(key)
        self.queue.get()
        self.queue.get(timeout=1)
        pool.shutdown(wait=False)
        with ExplainedWait(lambda: "x") as wait:
            time.sleep(1)
        return future.result()
"""


def test_waits_are_found_where_they_are_and_nowhere_else() -> None:
    found = [(scope, name, line) for scope, name, line in waits_in(ast.parse(SOURCE))]
    assert found == [
        ("Line.take", "receive", 4),
        ("Line.take", "ThreadPoolExecutor", 11),
        ("Line.take", "join", 13),
        ("Line.take", "get", 17),
        ("Line.take", "get", 18),
        ("Line.take", "result", 22),
    ]
