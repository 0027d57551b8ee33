"""The audit of a run in which a worker is killed sums up to every sample exactly once."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardyard_launcher.cli import main
from shardyard_launcher.commands import audit
from tests.support.identities import network_to
from tests.support.yards import Probes, finish, running_yard

SAMPLES, BATCH, EPOCHS = 203, 4, 2
LEASE = {"membership.heartbeat_ms": 200, "membership.lease_ms": 4_000}
Batches = dict[tuple[int, int, int], list[int]]


def batches_of(entries: Iterable[Mapping[str, Any]]) -> Batches:
    """How often each batch of each data shard was computed to the end, by the leases' own words. A lease that ended
    where nobody could read its end is summed up with the one after it."""
    found: Batches = {}
    open_since: dict[tuple[int, int, int], int] = {}

    def end(lease: Mapping[str, Any]) -> None:
        shard = lease["feed"], lease["epoch"], lease["index"]
        first = open_since.get(shard, 0) if lease["first"] is None else lease["first"]
        if lease["next"] is None:
            open_since[shard] = first
            return
        found.setdefault(shard, []).extend(range(first, lease["next"]))

    for entry in entries:
        if entry["event"] == "data_closed":
            end(entry)
        elif entry["event"] == "worker_freed":
            for lease in entry["held"]:
                end(lease)
    return found


@pytest.mark.long
def test_audit_of_a_run_with_a_killed_worker_has_every_sample_once(tmp_path: Path) -> None:
    with running_yard(tmp_path / "yard", settings=LEASE) as yard, Probes(tmp_path) as probes:
        options = ("--epochs", str(EPOCHS), "--pause-ms", "15")
        settings: dict[str, Any] = {
            "coordinator": yard.coordinator,
            "job__workers_expected": 2,
            "job__data__batches_per_data_shard": 9,
        }
        killed, _ = probes.start("count", *options, **settings)
        other = probes.start("count", *options, **settings)
        killed.wait_for("computed 4")
        killed.kill()
        assert finish(*other)["counts"] == [float(EPOCHS)] * SAMPLES
        asked = list(audit.ask(network_to(yard.coordinator), yard.coordinator, "probe"))
        (opened,) = [entry for entry in asked if entry["event"] == "feed_opened"]
        per_shard, shards = opened["batches_per_data_shard"], opened["units"]
        assert (opened["samples"], opened["batch_size"], per_shard) == (SAMPLES, BATCH, 9)
        positions: list[tuple[int, int]] = []
        for (_, epoch, index), batches in batches_of(asked).items():
            assert batches == list(range(len(batches))), "batches of a data shard in order, each once"
            for batch in batches:
                begin = (index * per_shard + batch) * BATCH
                positions += [(epoch, position) for position in range(begin, min(begin + BATCH, SAMPLES))]
        assert sorted(positions) == [(epoch, position) for epoch in range(EPOCHS) for position in range(SAMPLES)]
        died = [entry for entry in asked if entry["event"] == "worker_gone" and entry["died"]]
        freed = [entry for entry in asked if entry["event"] == "worker_freed" and entry["held"]]
        assert [entry["worker"] for entry in freed] == [entry["worker"] for entry in died]
        assert len(died) == 1
        assert shards == 6

        out = tmp_path / "audit.jsonl"
        assert main(["audit", "probe", "--coordinator", yard.coordinator, "-o", str(out)]) == 0
        assert [json.loads(line) for line in out.read_text().splitlines()] == asked
    table = tmp_path / "audit.csv"
    assert main(["audit", "probe", "--state", str(tmp_path / "yard"), "--format", "csv", "-o", str(table)]) == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    # what came later: servers that have left
    assert [(row["number"], row["event"], row["job"]) for row in rows[: len(asked)]] == [
        (str(entry["number"]), entry["event"], entry["job"]) for entry in asked
    ]
    for row, entry in zip(rows, asked, strict=False):
        if entry["event"] == "data_closed":
            assert (row["feed"], row["next"], row["worker"]) == ("0", str(entry["next"]), entry["worker"])
