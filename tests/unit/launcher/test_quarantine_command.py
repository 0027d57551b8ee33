"""`shardyard quarantined`: what is listed, for people and for programs."""

from __future__ import annotations

import pytest

from shardyard.domain.epochs import order
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import DataShardSource, RankSource
from shardyard.wire import common_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.commands import quarantine

REPLY = wire.ListQuarantinedReply(
    batches=[
        wire.QuarantinedBatch(
            feed=0,
            epoch=1,
            source=common_messages.source_to_wire(DataShardSource(0, 1, 2)),
            sequence=3,
            begin=4,
            end=6,
            deaths=3,
        ),
        wire.QuarantinedBatch(
            feed=0,
            epoch=0,
            source=common_messages.source_to_wire(RankSource(Rank(1))),
            sequence=8,
            begin=0,
            end=2,
            parameter="fc.weight",
            worker=(1 << 32) | 4,
        ),
    ],
    seed=7,
    feeds=[wire.FeedOrder(feed=0, samples=10, shuffle=True)],
)


def test_each_batch_has_its_samples_and_why_it_does_not_count() -> None:
    killed, not_finite = quarantine.described("digits", REPLY)
    indices = [order(seed=7, feed=0, epoch=epoch, samples=10, shuffle=True).tolist() for epoch in range(2)]
    assert killed == {
        "job": "digits",
        "feed": 0,
        "epoch": 1,
        "data_shard": 2,
        "batch": 3,
        "deaths": 3,
        "not_finite": None,
        "positions": [4, 6],
        "indices": indices[1][4:6],
    }
    assert (not_finite["rank"], not_finite["step"], not_finite["indices"]) == (1, 8, indices[0][:2])
    assert not_finite["not_finite"] == {"parameter": "fc.weight", "worker": (1 << 32) | 4}
    assert not_finite["deaths"] == 0


def test_people_read_why(capsys: pytest.CaptureFixture[str]) -> None:
    quarantine._show(quarantine.described("digits", REPLY))
    _, killed, not_finite = capsys.readouterr().out.splitlines()
    assert "3 of data shard 2" in killed
    assert "3 deaths" in killed
    assert "step 8 of logical rank 1" in not_finite
    assert "fc.weight not finite (worker 1.4)" in not_finite
