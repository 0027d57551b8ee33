"""Many members of a yard in one process: they register, join a job, and send heartbeats, each on its own connection.

They are workers without a model: what the coordinator sees of a worker that trains for itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import grpc

from harness.processes.answers import Conversation, worker_parser
from shardyard.config.settings import JobSettings
from shardyard.domain.limits import PROTOCOL
from shardyard.transport.grpc_client import OPTIONS
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as coordinator

JOB = "members"
CALL_S = 30.0
AT_ONCE = 32
"""Members that register at the same time."""


class Member:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.beats: list[float] = []
        """How long each heartbeat took, in seconds."""
        self.lost = ""
        self.lease_s = 0.0

    async def _call(self, method: Any, request: Any) -> Any:
        call = self._channel.unary_unary(method.path, method.request.encode, method.response.decode)
        return await call(request, timeout=CALL_S)

    async def join(self, settings: str) -> None:
        await self._channel.channel_ready()
        registered = await self._call(
            methods.REGISTER, coordinator.RegisterRequest(role=coordinator.ROLE_WORKER, protocol=PROTOCOL)
        )
        self._every_s, self.lease_s = registered.heartbeat_ms / 1_000, registered.lease_ms / 1_000
        self._beat = coordinator.HeartbeatRequest()
        self._beat.caller.incarnation, self._beat.caller.term = registered.incarnation, registered.term
        joins = coordinator.JoinJobRequest(name=JOB, settings_json=settings)
        joins.caller.CopyFrom(self._beat.caller)
        self._beat.caller.job = (await self._call(methods.JOIN_JOB, joins)).job
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Sends heartbeats as a member does: the next one is due some time after the answer to the last."""
        try:
            while True:
                await asyncio.sleep(self._every_s)
                begin = time.perf_counter()
                await self._call(methods.HEARTBEAT, self._beat)
                self.beats.append(time.perf_counter() - begin)
        except grpc.RpcError as error:
            self.lost = str(error)[:500]

    def took(self) -> list[float]:
        found, self.beats = self.beats, []
        return found


async def enter(members: list[Member]) -> None:
    settings = json.dumps(JobSettings(name=JOB).model_dump(mode="json"))
    for at in range(0, len(members), AT_ONCE):
        await asyncio.gather(*[member.join(settings) for member in members[at : at + AT_ONCE]])


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--members", type=int, required=True)
    options = parser.parse_args()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    members = [Member(os.environ["SHARDYARD_COORDINATOR"]) for _ in range(options.members)]

    def enter_all() -> dict[str, Any]:
        begin = time.perf_counter()
        loop.run_until_complete(enter(members))
        return {"seconds": time.perf_counter() - begin}

    def live(seconds: float) -> dict[str, Any]:
        loop.run_until_complete(asyncio.sleep(seconds))
        each_s = [took for member in members for took in member.took()]
        return {"each_s": each_s, "lost": [member.lost for member in members if member.lost][:3]}

    conversation.answer({"enter": enter_all, "live": live})
    # the yard ends with them
    os._exit(0)


if __name__ == "__main__":
    main()
