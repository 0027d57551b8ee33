"""A thief. It has the certificate of a worker, and has heard all that was said in the yard, passes too.

It does by chance whatever that certificate may be worth: it speaks for other workers, for servers and for people, and
gives orders to servers; it repeats what it has heard; it registers, joins the job, takes work and does not do it. At
the end of the faults the certificate is revoked.

It leaves out what a worker may do to its own job: under a number of its own it pushes nothing and opens no sources, it
says no goodbye and reports no error, and it does not stop the job. So a run is judged as without it. What no result
shows, it judges by itself: nobody gives it values under another's number, nor a pass for another job, and nothing is
answered after the revocation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from shardyard.domain import errors, limits
from shardyard.security.identity import Role
from shardyard.wire import frames, methods
from shardyard.wire.method import Method, Wire
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

from .identities import identity_of
from .network import Overheard, SimulatedNetwork
from .state import COORDINATOR, JOB, Yard
from .world import MS, SECOND, current

PLACE: Final = "thief-0"
VICTIM: Final = "worker-0"
"""Whose certificate it has."""
CALL_MS: Final = 400
GOES_ON: Final = 3 * SECOND
"""How long it goes on after its certificate was revoked."""
HEARD_OF: Final = 2 * SECOND
"""When all servers have heard of the revocation."""
MEMBERS_MAX: Final = 2
"""How many members it is at a time, at most."""
HIGH: Final = limits.SEQUENCE_MAX - 1


def steal(yard: Yard) -> None:
    """Goes on until some time after the certificate was revoked."""
    yard.wires.overheard = {}
    thief = Thief(yard)
    while yard.revoked_at is None or yard.world.now < yard.revoked_at + GOES_ON:
        yard.world.pause(thief.rng.randrange(10 * MS, 80 * MS))
        thief.act()


class Thief:
    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.rng = random.Random(f"thief {yard.plan.seed}")
        self.identity = identity_of(yard, VICTIM)
        self.network = SimulatedNetwork(yard.wires, current().process, self.identity)
        self.members: list[int] = []
        """Numbers under which it is a member, or was."""

    def act(self) -> None:
        acts = (self.repeat, self.push, self.push, self.speak, self.order, self.ask_servers, self.pose, self.take_work)
        act = self.rng.choice(acts)
        self.network.job_pass = self._some_pass()
        act()

    # ---- what it has heard

    def _heard(self, wanted: Callable[[Overheard], bool] = lambda _: True) -> Overheard | None:
        """One of the calls of all others, by chance."""
        assert self.yard.wires.overheard is not None
        calls = (each for of in self.yard.wires.overheard.values() for each in of)
        found = [each for each in calls if each.sent and each.caller != PLACE and wanted(each)]
        return self.rng.choice(found) if found else None

    def _is_of_another(self, heard: Overheard) -> bool:
        return heard.shown.identity != self.identity

    def _of_another_worker(self, *of: Method[Any, Any]) -> Overheard | None:
        def wanted(heard: Overheard) -> bool:
            identity = heard.shown.identity
            is_worker = identity is not None and identity.role is Role.WORKER and self._is_of_another(heard)
            return is_worker and heard.method in of

        return self._heard(wanted)

    def _some_pass(self) -> bytes:
        """Its own, another's, or none."""
        is_others, is_none = self.rng.random() < 0.2, self.rng.random() < 0.2
        heard = self._heard(lambda each: bool(each.shown.job_pass) and self._is_of_another(each) is is_others)
        return b"" if heard is None or is_none else heard.shown.job_pass

    def _push_of_another(self) -> tuple[str, server.PushHeader] | None:
        """The address of a server, and the header of a push to it by another worker, of what that has opened there."""
        heard = self._of_another_worker(methods.PUSH, methods.PUSH_PULL)
        if heard is None:
            return None
        headers = [server.PushHeader.FromString(bytes(frames.decode(each).header)) for each in heard.sent]
        gradients = [each for each in headers if each.kind == server.PUSH_KIND_GRADIENT]
        if not gradients:
            return None
        header = gradients[-1]
        who = heard.caller, heard.address
        opened = self._heard(lambda each: each.method == methods.OPEN_SOURCES and (each.caller, each.address) == who)
        if opened is not None:
            source = self.rng.choice(server.OpenSourcesRequest.FromString(opened.sent[0]).sources)
            header.name.source.CopyFrom(source.source)
            header.name.token = source.token
        return heard.address, header

    def _caller_of_another(self) -> common.Caller | None:
        heard = self._of_another_worker(methods.HEARTBEAT)
        return None if heard is None else coordinator.HeartbeatRequest.FromString(heard.sent[0]).caller

    # ---- how it calls

    def _send(
        self, address: str, method: Method[Any, Any], *sent: Any, is_secret: bool = False
    ) -> tuple[list[Any], errors.ShardyardError | None]:
        """The answers, and the refusal. `is_secret`: an answer is a violation."""
        world, revoked_at = self.yard.world, self.yard.revoked_at
        peer = self.network.connect(address, name=address.partition(":")[0])
        answers: list[Any] = []
        refusal: errors.ShardyardError | None = None
        try:
            for answer in peer.run(method, sent, CALL_MS):
                answers.append(answer)
                if not method.streams_out:
                    break
        except errors.ShardyardError as error:
            refusal = error
        finally:
            peer.close()
        world.say(f"{current().process} {method.name}: {len(answers)} answers, {refusal or 'not refused'}")
        is_over = revoked_at is not None and (address == COORDINATOR or world.now > revoked_at + HEARD_OF)
        if answers and (is_secret or is_over):
            world.violations.append(f"{method.name} of a thief is answered")
        return answers, refusal

    # ---- what it does

    def repeat(self) -> None:
        """Sends what was sent, by another or by the one whose certificate it has."""
        heard = self._heard()
        if heard is not None and heard.method != methods.REGISTER:
            as_it_was = replace(heard.method, request=Wire(bytes, heard.method.request.decode))
            self._send(heard.address, as_it_was, *heard.sent)

    def push(self) -> None:
        """Pushes a gradient as the next one of another worker."""
        found = self._push_of_another()
        if found is None:
            return
        address, header = found
        for field in ("pull", "plan", "attach", "ssp_report", "verdict", "rows", "table_groups", "requested", "bases"):
            header.ClearField(field)
        data = np.full(sum(part.payload_bytes for part in header.parts) // 8, 7.0).tobytes()
        if self.rng.random() < 0.2:
            header.caller.job += 1
        header.name.first = header.name.last = HIGH
        _, refusal = self._send(address, methods.PUSH, frames.Frame(header.SerializeToString(), 0, data))
        if isinstance(refusal, errors.SequenceGap):  # the server has told which push would be the next
            header.name.first = header.name.last = int(refusal.facts["next"])
            self._send(address, methods.PUSH, frames.Frame(header.SerializeToString(), 0, data))

    def speak(self) -> None:
        """Speaks to the coordinator for another worker, for a server, or for nobody, as people do."""
        other = self._caller_of_another()
        if other is None:
            return
        told: list[tuple[Method[Any, Any], Any]] = [
            (methods.HEARTBEAT, coordinator.HeartbeatRequest(caller=other, step=1 << 40)),
            (methods.LEAVE, coordinator.LeaveRequest(caller=other)),
            (methods.LEAVE, coordinator.LeaveRequest(caller=other, error="it left")),
            (methods.DRAIN, coordinator.DrainRequest(caller=other)),
            (methods.DRAIN, coordinator.DrainRequest(member=str(other.incarnation))),
            (methods.DRAIN, coordinator.DrainRequest(member="server-0:7000")),
            (methods.JOIN_JOB, coordinator.JoinJobRequest(caller=other, name=JOB)),
            (methods.STOP_JOB, coordinator.StopJobRequest(caller=other)),
            (methods.STOP_JOB, coordinator.StopJobRequest(job_name=JOB)),
            (methods.TAKE_CHECKPOINT, coordinator.TakeCheckpointRequest(caller=other)),
            (methods.TAKE_CHECKPOINT, coordinator.TakeCheckpointRequest(job_name=JOB)),
            (methods.COMMIT_VARIABLES, coordinator.CommitVariablesRequest(caller=other, generation=1)),
            (methods.LEASE_DATA, coordinator.LeaseDataRequest(caller=other)),
            (methods.CLOSE_LEASE, coordinator.CloseLeaseRequest(caller=other)),
            (methods.SWITCH_CONSISTENCY, coordinator.SwitchConsistencyRequest(job_name=JOB)),
            (methods.RESTORE_CHECKPOINT, coordinator.RestoreCheckpointRequest(job_name=JOB)),
            (methods.REVOKE_IDENTITY, coordinator.RevokeIdentityRequest(holder="worker/worker-1")),
            (methods.REVOKE_IDENTITY, coordinator.RevokeIdentityRequest(holder="server/server-0")),
            (methods.REPORT_EXIT, coordinator.ReportExitRequest(caller=other, pid=101, exit_code=-9)),
        ]
        method, request = self.rng.choice(told)
        self._send(COORDINATOR, method, request)

    def order(self) -> None:
        """Orders a server to do something, as the coordinator."""
        found = self._push_of_another()
        if found is None:
            return
        address, header = found
        about: dict[str, Any] = {
            "caller": common.Caller(job=header.caller.job, term=self.rng.choice((1, 2, HIGH))),
            "server": header.server,
            "generation": header.generation,
        }
        by = about["caller"]
        workers = [header.caller.incarnation]
        told: list[tuple[Method[Any, Any], Any]] = [
            (methods.FENCE, server.FenceRequest(caller=by, incarnations=workers)),
            (methods.DROP_JOB, server.DropJobRequest(caller=by)),
            (methods.PASS_OVER, server.PassOverRequest(**about, worker=workers[0], next=HIGH)),
            (methods.SET_STALENESS, server.SetStalenessRequest(**about, staleness=0, switches=1 << 30)),
            (methods.FORGET_SOURCES, server.ForgetSourcesRequest(**about, floor=HIGH, workers=workers)),
            (methods.SAVE_CHECKPOINT, server.SaveCheckpointRequest(**about, url="memory://thief", number=1 << 40)),
            (methods.READ_LEDGER, server.ReadLedgerRequest(**about, sources=[{"source": header.name.source}])),
        ]
        method, request = self.rng.choice(told)
        self._send(address, method, request, is_secret=method == methods.READ_LEDGER)

    def ask_servers(self) -> None:
        """Opens sources and reads, for another worker."""
        found = self._push_of_another()
        if found is None:
            return
        address, header = found
        about: dict[str, Any] = {
            "caller": header.caller,
            "server": header.server,
            "generation": header.generation,
        }
        partitions, pin = [part.partition for part in header.parts], b"p" * 16
        token = {"source": header.name.source, "token": HIGH}
        elsewhere = common.Caller(job=header.caller.job + 1)
        told: list[tuple[Method[Any, Any], Any]] = [
            (methods.OPEN_SOURCES, server.OpenSourcesRequest(**about, sources=[token])),
            (methods.PULL, server.PullRequest(**about, partitions=partitions)),
            (methods.PIN, server.PinRequest(**about, pin=pin, lease_ms=60_000)),
            (methods.UNPIN, server.UnpinRequest(caller=elsewhere, pin=pin)),
            (methods.READ_OPTIMIZER, server.ReadOptimizerRequest(**about)),
        ]
        method, request = self.rng.choice(told)
        self._send(address, method, request, is_secret=True)

    def pose(self) -> None:
        """Registers as what it is not, where others are."""
        role, address = self.rng.choice(
            (
                (coordinator.ROLE_SERVER, "server-0:7000"),
                (coordinator.ROLE_SERVER, "thief-0:7000"),
                (coordinator.ROLE_AGENT, ""),
                (coordinator.ROLE_AGENT, "worker-1:7000"),
            )
        )
        self._send(COORDINATOR, methods.REGISTER, self._registration(role, address))

    def _registration(self, role: Any, address: str = "") -> coordinator.RegisterRequest:
        pid = self.rng.randrange(100, 110)  # others may have it
        return coordinator.RegisterRequest(
            role=role, address=address, protocol=limits.PROTOCOL, host="simulated", pid=pid
        )

    def take_work(self) -> None:
        """Works under the name of the one whose certificate it has, and does nothing of it."""
        heard = self._heard(lambda each: each.method == methods.JOIN_JOB)
        if len(self.members) < MEMBERS_MAX or self.rng.random() < 0.1:
            replies, _ = self._send(COORDINATOR, methods.REGISTER, self._registration(coordinator.ROLE_WORKER))
            for reply in replies:
                self.members = [*self.members[-MEMBERS_MAX + 1 :], reply.incarnation]
                if heard is not None:
                    joins = coordinator.JoinJobRequest.FromString(heard.sent[0])
                    joins.caller.incarnation = reply.incarnation
                    self._send(COORDINATOR, methods.JOIN_JOB, joins)
            return
        own = common.Caller(incarnation=self.rng.choice(self.members))
        other, closes = self._caller_of_another(), coordinator.CloseLeaseRequest()
        if other is not None:
            own.job = other.job
        closed = self._of_another_worker(methods.CLOSE_LEASE)
        if closed is not None:
            closes = coordinator.CloseLeaseRequest.FromString(closed.sent[0])
        closes.caller.CopyFrom(own)
        told: list[tuple[Method[Any, Any], Any]] = [
            (methods.HEARTBEAT, coordinator.HeartbeatRequest(caller=own)),
            (methods.HEARTBEAT, coordinator.HeartbeatRequest(caller=own, step=1 << 40)),
            (methods.LEASE_DATA, coordinator.LeaseDataRequest(caller=own)),
            (methods.CLOSE_LEASE, closes),
            (methods.LEAVE, coordinator.LeaveRequest(caller=own, drained=True)),
        ]
        elsewhere = common.Caller(incarnation=own.incarnation, job=own.job + 1)
        passes = coordinator.HeartbeatRequest(caller=elsewhere, pass_until_s=1)
        method, request = self.rng.choice([*told, (methods.HEARTBEAT, passes)])
        self._send(COORDINATOR, method, request, is_secret=request is passes)
