"""The golden vectors: one example of each important message, and the bytes that it has on the wire.

`python tests/golden/make.py` prints them as JSON; with `--write` it writes tests/golden/vectors.json. Do that only for
a change of the protocol that is meant: tests/unit/library/wire/test_golden.py compares the code with the committed
bytes. A client in another language can be tested with the same file.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

FILE = Path(__file__).with_name("vectors.json")

CALLER = common.Caller(job=(1 << 32) + 7, incarnation=(1 << 32) + 9, term=1)
VERSION = common.Version(life=1, number=41)
RATES = common.ParameterGroup(values=[0.125, 0.5, 0.0, 0.0, 0.0, 0.0])


def payload(*values: float) -> bytes:
    """float32 values, little-endian, filled up with zeros to a multiple of 64 bytes."""
    data = struct.pack(f"<{len(values)}f", *values)
    return data + bytes(-len(data) % 64)


def push_name(**source: object) -> common.PushName:
    kind = common.Source(**source)  # type: ignore[arg-type]
    return common.PushName(source=kind, token=3, first=41, last=41)


def push_header(name: common.PushName, **more: object) -> server.PushHeader:
    return server.PushHeader(
        caller=CALLER,
        server=(1 << 32) + 2,
        generation=1,
        name=name,
        kind=server.PUSH_KIND_GRADIENT,
        parts=[server.PushPart(partition=0, payload_bytes=64), server.PushPart(partition=2)],
        weight=64.0,
        groups=[RATES],
        **more,  # type: ignore[arg-type]
    )


def pull_request() -> server.PullRequest:
    return server.PullRequest(
        caller=CALLER,
        server=(1 << 32) + 2,
        generation=1,
        partitions=[0, 2],
        number=42,
        exactly=True,
        wait_ms=500,
    )


def without_work(**more: Any) -> server.PushHeader:
    """Of a request that pushes nothing."""
    return server.PushHeader(caller=CALLER, server=(1 << 32) + 2, generation=1, kind=server.PUSH_KIND_NOTHING, **more)


def layout() -> common.JobLayout:
    return common.JobLayout(
        variables=[
            common.VariableSpec(
                name="weight", dtype=common.DTYPE_FLOAT32, shape=[5, 4], kind=common.VARIABLE_KIND_PARAMETER
            ),
            common.VariableSpec(name="mean", dtype=common.DTYPE_FLOAT64, shape=[3], kind=common.VARIABLE_KIND_BUFFER),
        ],
        optimizer=common.OptimizerSpec(
            kind="sgd",
            settings=["lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"],
            groups=[RATES],
        ),
        partitions=[
            common.PartitionLayout(
                partition=0, payload_bytes=64, blocks=[common.Block(variable=0, offset=0, length=16, position=0)]
            ),
            common.PartitionLayout(
                partition=1,
                payload_bytes=128,
                blocks=[
                    common.Block(variable=0, offset=16, length=4, position=0),
                    common.Block(variable=1, offset=0, length=3, position=64),
                ],
            ),
        ],
    )


def messages() -> dict[str, Message]:
    """The examples by name; the part before the dot is the message's name in the protos."""
    shard = common.DataShardName(feed=0, epoch=2, index=17)
    map_ = common.PartitionMap(
        generation=1,
        owners=[
            common.PartitionOwner(partition=0, server=(1 << 32) + 2, address="10.0.0.2:7071"),
            common.PartitionOwner(partition=1, server=(1 << 32) + 3, address="10.0.0.3:7071"),
        ],
    )
    by_shard, by_rank = push_name(data_shard=shard), push_name(logical_rank=0)
    results = server.PushReply(
        parts=[
            server.PartReply(partition=0, outcome=server.OUTCOME_APPLIED, next=42, version=VERSION),
            server.PartReply(partition=2, outcome=server.OUTCOME_DUPLICATE, next=42, version=VERSION),
        ]
    )
    small = server.PushHeader(
        caller=CALLER,
        server=(1 << 32) + 2,
        generation=1,
        name=by_shard,
        kind=server.PUSH_KIND_GRADIENT,
        parts=[server.PushPart(partition=0, payload_bytes=64)],
        weight=64.0,
        groups=[RATES],
    )
    return {
        "PushHeader.data_shard": push_header(by_shard),
        "PushHeader.logical_rank": push_header(
            by_rank, pull=server.PullRequest(partitions=[0, 2], number=42, exactly=True, wait_ms=500)
        ),
        "PushHeader.worker": push_header(push_name(worker=(1 << 32) + 9)),
        "PushHeader.plan": push_header(
            by_rank,
            pull=server.PullRequest(partitions=[0, 2], number=42, exactly=True, wait_ms=500),
            plan=1,
        ),
        "PushHeader.step": server.PushHeader(
            step=server.Step(plan=1, token=3, first=41, last=41, number=42),
        ),
        "PushHeader.step_other": server.PushHeader(
            step=server.Step(plan=1, token=3, first=41, last=41, number=43, source=by_shard.source, weight=32.0),
        ),
        "PushHeader.nothing": without_work(pull=server.PullRequest(partitions=[0, 2], number=42)),
        "PushHeader.attach": without_work(attach=server.SharedMemory(bytes=1 << 20)),
        "PushHeader.attach_rows": without_work(attach_rows=server.SharedMemory(bytes=1 << 27)),
        "PushHeader.rows_at": without_work(
            pull=server.PullRequest(partitions=[0, 2], number=42),
            requested=[server.RequestedRows(table=1, partitions=[0, 2], rows=[3, 1])],
            rows_at=0,
            requested_at=1 << 26,
        ),
        "PushHeader.shared": push_header(
            by_rank,
            pull=server.PullRequest(partitions=[0, 2], number=43, exactly=True, wait_ms=500, shared=True),
            shared_at=64,
        ),
        "PushHeader.verdict": without_work(
            pull=server.PullRequest(partitions=[0, 2], number=42, exactly=True, wait_ms=500),
            verdict=server.StepVerdict(step=41, square_norm=6.25),
        ),
        "PushHeader.members": without_work(
            pull=server.PullRequest(partitions=[0, 2], number=42, exactly=True, wait_ms=500),
            verdict=server.StepVerdict(step=41, members=[0, 2]),
        ),
        "PushHeader.detach": without_work(detach=True),
        "PushHeader.empty": server.PushHeader(
            caller=CALLER, server=1, generation=1, name=by_rank, kind=server.PUSH_KIND_EMPTY, parts=[{"partition": 0}]
        ),
        "PushHeader.bases": push_header(
            by_shard,
            bases=server.Bases(
                parts=[server.Base(version=VERSION), server.Base(version=common.Version(life=2, number=40))]
            ),
        ),
        "PushHeader.bases_alike": push_header(
            by_shard, bases=server.Bases(parts=[server.Base(version=VERSION, alike=1)])
        ),
        "PushFrame.first": server.PushFrame(header=small, data=payload(1.0, -2.0, 0.5)),
        "PushFrame.later": server.PushFrame(offset=1 << 20, data=payload(1.0)),
        "PullRequest": pull_request(),
        "PullHeader.words": server.PullHeader(words=[1, 42, 1, 41, 3, 42, 1, 41, 1, 42, 1, 42]),
        "PullHeader.parts": server.PullHeader(push=results, parts=[server.PulledPart(partition=0, version=VERSION)]),
        "PullHeader.alike": server.PullHeader(
            push=server.PushReply(
                parts=[
                    server.PartReply(partition=0, outcome=server.OUTCOME_RECORDED, next=42, version=VERSION, alike=1)
                ]
            ),
            parts=[server.PulledPart(partition=0, version=VERSION, alike=1)],
        ),
        "PullHeader.attached": server.PullHeader(attached=True, regions=[server.SharedMemory(bytes=1 << 21)]),
        "PullHeader.not_attached": server.PullHeader(not_attached="the memory of process 4242 cannot be opened"),
        "PullHeader.places": server.PullHeader(
            push=results,
            parts=[server.PulledPart(partition=0, version=VERSION, alike=1)],
            regions=[server.SharedMemory(bytes=1 << 21, region=1)],
            place_regions=[1, 0],
            places=[4096, 0],
        ),
        "PullHeader.not_yet": server.PullHeader(
            not_yet=server.NotYet(
                missing=[
                    server.Missing(partition=0, have=VERSION, want=42, waiting_for="logical rank 1 of step 41"),
                ]
            )
        ),
        "PullHeader.gathered": server.PullHeader(
            not_yet=server.NotYet(
                missing=[
                    server.Missing(partition=0, have=VERSION, want=42, waiting_for="the verdict on step 41"),
                    server.Missing(partition=2, have=VERSION, want=42, waiting_for="logical rank 1 of step 41"),
                ]
            ),
            gathered=[server.Gathered(partition=0, step=41, square_norm=2.25)],
        ),
        "VerdictGiven": server.VerdictGiven(verdict=server.StepVerdict(step=41, square_norm=6.25), partitions=[0, 2]),
        "PullFrame.first": server.PullFrame(
            header=server.PullHeader(parts=[server.PulledPart(partition=0, version=VERSION)]),
            data=payload(0.25, 0.75),
        ),
        "PushReply": results,
        "OpenSourcesRequest": server.OpenSourcesRequest(
            caller=CALLER,
            server=(1 << 32) + 2,
            generation=1,
            sources=[server.SourceToken(source=by_shard.source, token=3)],
        ),
        "OpenSourcesReply": server.OpenSourcesReply(
            sources=[
                server.SourceWatermarks(
                    source=by_shard.source,
                    watermarks=[
                        server.Watermark(partition=0, next=41, version=VERSION),
                        server.Watermark(partition=2, next=40, version=VERSION),
                    ],
                )
            ]
        ),
        "CreatePartitionsRequest": server.CreatePartitionsRequest(
            caller=common.Caller(job=(1 << 32) + 7, term=1),
            generation=1,
            layout=layout(),
            partitions=[0, 1],
            mode=common.UPDATE_MODE_SYNC,
            logical_ranks=2,
            server=(1 << 32) + 2,
            clipping=server.Clipping(norm=1.0, value=0.5),
        ),
        "JobLayout": layout(),
        "PartitionMap": map_,
        "ErrorDetail": common.ErrorDetail(
            code="SequenceGap",
            what="data shard 0.2.17 #43 in partition 2, whose next is #41",
            why="a partition applies the work of a source in order",
            todo="go on from the watermark given",
            facts={"next": "41", "partition": "2"},
        ),
        "RegisterRequest": coordinator.RegisterRequest(
            role=coordinator.ROLE_WORKER, protocol=1, release="0.1.0", host="box", pid=4242, agent=5, local_index=1
        ),
        "RegisterReply": coordinator.RegisterReply(
            incarnation=(1 << 32) + 9, term=1, heartbeat_ms=1_000, lease_ms=5_000
        ),
        "HeartbeatRequest": coordinator.HeartbeatRequest(
            caller=CALLER, step=41, samples=2_624, metrics=[{"name": "loss", "value": 0.25}], waiting_for="step 41"
        ),
        "HeartbeatReply": coordinator.HeartbeatReply(
            term=1,
            job_state=coordinator.JOB_STATE_RUNNING,
            generation=1,
            ranks=[{"rank": 0, "token": 3}],
            chief=True,
            workers=2,
        ),
        "JoinJobRequest": coordinator.JoinJobRequest(
            caller=CALLER, name="digits", settings_json='{"name":"digits"}', run_id="x", run_number=1
        ),
        "JoinJobReply": coordinator.JoinJobReply(
            job=(1 << 32) + 7, settings_json='{"name":"digits"}', started=True, seed=1, logical_ranks=2, chief=True
        ),
        "RegisterVariablesReply": coordinator.RegisterVariablesReply(layout=layout(), map=map_, initializer=True),
        "LeaseDataReply.lease": coordinator.LeaseDataReply(lease={"data_shard": shard, "token": 3, "end": 1_024}),
        "LeaseDataReply.wait": coordinator.LeaseDataReply(wait={"retry_ms": 100, "waiting_for": "worker 1.8"}),
        "LeaseDataReply.done": coordinator.LeaseDataReply(done=coordinator.FeedDone()),
        "LaunchEvent.exited": agent.LaunchEvent(
            number=3, exited=agent.ProcessExited(local_index=1, pid=4242, exit_code=-9, will_restart=True)
        ),
    }


def main() -> None:
    vectors = {
        name: message.SerializeToString(deterministic=True).hex() for name, message in sorted(messages().items())
    }
    text = json.dumps(vectors, indent=1) + "\n"
    if "--write" in sys.argv[1:]:
        FILE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
