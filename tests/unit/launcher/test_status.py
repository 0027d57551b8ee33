"""`shardyard status`: as tables for people, as JSON for programs."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.status.as_json import to_json
from shardyard_launcher.status.as_tables import as_tables
from shardyard_launcher.status.report import LocalReport, YardReport
from shardyard_launcher.terminal.quantities import describe_size
from tests.support.launcher_replies import BOUNDED, yard_status


def report() -> YardReport:
    said = server_wire.DescribeServerReply(
        server=1,
        pushes_applied=5,
        workers_attached=2,
        workers_streaming=1,
        partitions=[
            server_wire.DescribedPartition(job=9, partition=0, version=common.Version(life=1, number=41)),
            server_wire.DescribedPartition(job=9, partition=1, version=common.Version(life=1, number=40)),
            server_wire.DescribedPartition(job=8, partition=0, version=common.Version(life=1, number=99)),
        ],
    )
    return YardReport("h:7070", yard_status(), {1: said})


def shown_status(found: YardReport, width: int = 200) -> str:
    """The tables, without blanks at the ends of lines."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(as_tables(found))
    return re.sub(r" +\n", "\n", stream.getvalue())


def job_as_json(found: YardReport) -> dict[str, Any]:
    """The job `mine`."""
    job = json.loads(to_json(found))["jobs"][1]
    assert isinstance(job, dict)
    return job


def test_status_says_who_has_told_a_job_to_stop_and_why() -> None:
    found = report()
    assert job_as_json(found)["stop"] is None
    stop = found.status.jobs[1].stop
    stop.reason = "loss is [nan]"
    for worker, settled, step, said in (
        (0, False, 0, "told to stop by a person: loss is [nan]\n"),
        ((1 << 32) + 4, True, 1_210, "told to stop by worker 1.4: loss is [nan]; before step 1,210\n"),
    ):
        stop.worker, stop.settled, stop.step = worker, settled, step
        assert said in shown_status(found)
        told = job_as_json(found)["stop"]
        assert told == {"reason": "loss is [nan]", "worker": worker or None, "step": step or None}


def test_status_says_what_a_job_was_switched_to_and_who_is_behind() -> None:
    found = report()
    assert job_as_json(found)["switch"] is None
    fourth, many = (1 << 32) + 4, [(1 << 32) + number for number in range(1, 11)]
    listed = ", ".join(f"1.{number}" for number in range(1, 9))
    for servers, behind, said in (
        (False, [fourth], "switched to bounded, 3 steps; not all servers have changed yet\n"),
        (True, [fourth], "switched to bounded, 3 steps; worker 1.4 has not changed yet\n"),
        (True, many, f"switched to bounded, 3 steps; workers {listed} and 2 more have not changed yet\n"),
        (True, [], "switched to bounded, 3 steps\n"),
    ):
        switch = wire.SwitchStatus(consistency=BOUNDED, servers=servers, behind=behind)
        found.status.jobs[1].consistency.CopyFrom(switch)
        assert said in shown_status(found)
        told = job_as_json(found)["switch"]
        assert told == {
            "number": 2,
            "mode": "bounded",
            "staleness": 3,
            "strategy": None,
            "servers": servers,
            "workers_behind": behind,
            "before_step": None,
            "unfinished": None,
        }


def test_status_says_before_which_step_a_synchronous_job_goes_over() -> None:
    found = report()
    for step, said in (
        (0, "switched to bounded, 3 steps; 2 workers have not reported yet how far they are\n"),
        (1_210, "switched to bounded, 3 steps before step 1,210; its partitions have not changed yet\n"),
    ):
        switch = wire.SwitchStatus(consistency=BOUNDED, behind=[4, 5], step=step)
        found.status.jobs[1].consistency.CopyFrom(switch)
        assert said in shown_status(found)
        assert job_as_json(found)["switch"]["before_step"] == (step or None)


def test_status_says_which_data_shards_are_to_be_done_before_a_job_goes_over_to_steps() -> None:
    found = report()
    sync = wire.Consistency(number=3, mode=wire.CONSISTENCY_MODE_SYNC)
    switch = wire.SwitchStatus(consistency=sync, behind=[4], step=0, unfinished="data shard 0.1.2 (worker 1.4)")
    found.status.jobs[1].consistency.CopyFrom(switch)
    assert "switched to sync; first must end: data shard 0.1.2 (worker 1.4)\n" in shown_status(found)
    told = job_as_json(found)["switch"]
    assert (told["unfinished"], told["before_step"]) == ("data shard 0.1.2 (worker 1.4)", None)


def test_status_says_that_a_job_is_hybrid() -> None:
    found = report()
    job = found.status.jobs[1]
    job.ClearField("staleness")
    job.mode, job.logical_ranks, job.rows_at_once = common.UPDATE_MODE_SYNC, 4, True
    assert "hybrid, 4 ranks" in shown_status(found)
    assert job_as_json(found)["mode"] == "hybrid"


def test_status_shows_what_coordinator_members_and_jobs_wait_for() -> None:
    found = report()
    found.status.waiting_for = "the journal j to be written, for 7.0 s"
    found.status.full_disk.CopyFrom(wire.FullDisk(file="j", free_bytes=512, room_bytes=4 << 20, full_ms=34_000))
    found.status.members[0].waiting_for = "step 40 of partition 3, for checkpoint 12, for 6.0 s"
    found.status.jobs[1].waits.append("a server for partition 3, 4, for 5.1 s")
    local = LocalReport(1, (), {}, ("server-1 (pid 4); its log is s.log",))
    found = YardReport(found.coordinator, found.status, found.servers, local)
    text = shown_status(found, width=400)
    assert "  waits for the journal j to be written, for 7.0 s\n" in text
    assert "the disk of the journal j is full: 512 B free, for 34 s; room for 4.0 MiB of decisions is left\n" in text
    assert "; waits for step 40 of partition 3, for checkpoint 12, for 6.0 s" in " ".join(text.split())
    assert "  waits for a server for partition 3, 4, for 5.1 s\n" in text
    assert "not ready yet: server-1 (pid 4); its log is s.log\n" in text
    document = json.loads(to_json(found))
    assert document["waiting_for"] == "the journal j to be written, for 7.0 s"
    assert document["full_disk"] == {"file": "j", "free_bytes": 512, "room_bytes": 4 << 20, "full_ms": 34_000}
    assert document["members"][0]["waiting_for"].startswith("step 40")
    assert document["jobs"][1]["waits"] == ["a server for partition 3, 4, for 5.1 s"]
    assert document["local"]["unready"] == ["server-1 (pid 4); its log is s.log"]


def yard_of(*jobs: wire.JobStatus) -> YardReport:
    return YardReport("h:7070", wire.StatusReply(term=1, jobs=jobs), {})


def test_running_jobs_come_first_and_then_the_latest_that_have_ended() -> None:
    finished = [wire.JobStatus(job=number, name=f"old-{number}", state=wire.JOB_STATE_FINISHED) for number in range(6)]
    running = [wire.JobStatus(job=number, name=f"new-{number}", state=wire.JOB_STATE_RUNNING) for number in (2, 9)]
    found = yard_of(*finished, *running)
    text = shown_status(found)
    assert re.findall(r"^job (\S+)", text, re.M) == ["new-2", "new-9", "old-5", "old-4", "old-3"]
    assert "3 more jobs have ended (old-0, old-1, old-2); --job NAME shows one\n" in text
    names = [job["name"] for job in json.loads(to_json(found))["jobs"]]
    assert names == ["new-2", "new-9", *(f"old-{number}" for number in (5, 4, 3, 2, 1, 0))]


def test_one_job_is_shown_with_its_workers() -> None:
    found = report().of_job("mine")
    assert re.findall(r"^job (\S+)", shown_status(found), re.M) == ["mine"]
    assert [member.pid for member in found.status.members] == [1, 2, 4]
    assert found.status.term == 1
    assert report().of_job("9").jobs == found.jobs
    with pytest.raises(errors.NotFound, match="the yard has no job 'none'; its jobs are: mine, other"):
        report().of_job("none")


def test_progress_in_the_data_is_shown() -> None:
    found = report()
    feed = found.status.jobs[1].feeds[0]
    feed.free, feed.leased, feed.done = 20, 4, 16
    found.status.jobs[1].samples = 1_617
    assert "\n  epoch 1 of 2, 44%, 3 s left\n" in shown_status(found)
    said = {"feed": 0, "epoch": 1, "epochs": 2, "fraction": 0.4499, "left_s": 2.4}
    assert job_as_json(found)["progress"] == said
    assert json.loads(to_json(found))["jobs"][0]["progress"] is None


def test_status_as_json_has_all_there_is() -> None:
    document = json.loads(to_json(report()))
    job = document["jobs"][1]
    assert document["coordinator"] == "h:7070"
    assert [member["role"] for member in document["members"]] == ["server", "agent", "worker", "worker"]
    assert document["members"][3]["waiting_for"] == "server 1"
    assert [member["id"] for member in document["members"]] == [
        str(Incarnation(member["incarnation"])) for member in document["members"]
    ]
    assert (job["name"], job["state"], job["mode"], job["step"]) == ("mine", "running", "sync", 1200)
    assert job["metrics"] == {"loss": 0.123456}
    assert [part["version"] for part in job["partitions"]] == [41, 40]
    assert job["feeds"][0]["data_shards_done"] == 3
    assert document["servers"] == [
        {
            "server": 1,
            "partitions": 3,
            "pushes_applied": 5,
            "pushes_duplicate": 0,
            "bytes_received": 0,
            "bytes_sent": 0,
            "workers_attached": 2,
            "workers_streaming": 1,
            "pins": 0,
            "memory_bytes_max": None,
        }
    ]


def test_status_shows_embedding_tables_as_servers_describe_them() -> None:
    found = report()
    job = found.status.jobs[1]
    job.tables.add(name="users", dim=16, optimizer="adagrad", rows=7)
    job.tables.add(name="words", dim=8, optimizer="adam", rows=12)
    first = found.servers[1]
    assert isinstance(first, server_wire.DescribeServerReply)
    users = {"name": "users", "rows": 1_000, "bytes": 3 << 20, "ids": 1_200, "homes": 2_000}
    first.tables.add(job=9, **users, admitted=1_100, expired=100, cold_rows=400, disk_bytes=1 << 20)
    first.tables.add(job=8, **users, admitted=50, expired=50)
    first.memory_bytes_max = 12 << 20
    second = server_wire.DescribeServerReply(server=2)
    on_disk = {"cold_rows": 100, "disk_bytes": 1 << 19, "disk_refused": "No space left on device"}
    second.tables.add(job=9, **users, admitted=1_500, expired=500, **on_disk)
    found = YardReport(
        found.coordinator, found.status, {1: first, 2: second, 3: errors.ServerUnavailable("it is away")}
    )
    text = shown_status(found)
    assert re.search(r"tables of mine \(id 9\)", text)
    assert re.search(r"users +16 +adagrad +2,000 +2,400 +6\.0 MiB +1\.5 MiB +60% full +2,600 +600\b", text)
    assert "tables take 6.0 MiB of 12.0 MiB" in text
    # what the coordinator heard last, where no server says more
    assert re.search(r"words +8 +adam +12 +- +- +- +- +- +-", text)
    said = "colder rows of users stay in memory because the disk refuses them: server 2: No space left on device"
    assert said in " ".join(text.split())
    tables = job_as_json(found)["tables"]
    assert tables[0] == {
        "name": "users",
        "dim": 16,
        "optimizer": "adagrad",
        "rows": 2_000,
        "ids": 2_400,
        "bytes": 6 << 20,
        "rows_on_disk": 500,
        "disk_bytes": 3 << 19,
        "disk_refused": ["server 2: No space left on device"],
        "load": 0.6,
        "admitted": 2_600,
        "expired": 600,
        "servers": 2,
    }
    assert (tables[1]["rows"], tables[1]["servers"], tables[1]["load"]) == (12, 0, None)
    assert json.loads(to_json(found))["jobs"][0]["tables"] == []


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_told_in_their_unit(nbytes: int, text: str) -> None:
    assert describe_size(nbytes) == text


def test_status_tables_show_members_jobs_and_versions() -> None:
    text = shown_status(report())
    assert "coordinator h:7070, up 1 min 1 s" in text
    assert re.search(r"worker +4 .* mine .* waits for server 1", text)
    assert "3 partitions, 5 pushes applied, shares memory with 2 workers, streams to 1 worker" in " ".join(text.split())
    assert re.search(r"running +sync, 2 ranks +1 +1,200 +15,360 +812 +loss 0.1235", text)
    assert re.search(r"0, 1 +40 to 41", text)


def test_workers_say_how_gradients_are_summed() -> None:
    found = report()
    worker = next(each for each in found.status.members if each.incarnation == 3)
    worker.sums, worker.dropped = "over gloo", 2
    assert "ranks 0; sums gradients over gloo; 2 contributions came late" in " ".join(shown_status(found).split())
    shown = {each["incarnation"]: each for each in json.loads(to_json(found))["members"]}
    assert (shown[3]["sums"], shown[4]["sums"]) == ("over gloo", "")


def test_ended_job_shows_the_partitions_that_are_held_still() -> None:
    found = report()
    job = found.status.jobs[1]
    job.state = wire.JOB_STATE_FINISHED
    assert "partitions of mine (id 9)" in shown_status(found)
    assert "data of mine (id 9)" in shown_status(found)
    said = found.servers[1]
    assert isinstance(said, server_wire.DescribeServerReply)
    del said.partitions[:2]
    assert "partitions of" not in shown_status(found)


def test_server_that_does_not_answer_is_part_of_the_status() -> None:
    broken = YardReport("h:7070", yard_status(), {1: errors.ServerUnavailable("server 1 at h:1 is gone")})
    document = json.loads(to_json(broken))
    assert document["servers"] == [{"server": 1, "error": "server 1 at h:1 is gone"}]
    assert document["jobs"][1]["partitions"][0]["version"] is None
