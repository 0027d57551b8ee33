"""Ctrl-C in a script: a step is whole or was not begun, the job is left in good order, soon, and nobody else is harmed.

The oracle: each push adds whole numbers to every partition, so half of one shows.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.domain import errors
from shardyard.runtime.failpoints import armed
from shardyard.wire import methods
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.session.interrupts import INTERRUPTS, LOOK_AGAIN_S
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, local_yard
from tests.support.yards import Probes, Script, finish, running_yard

SOON_S = 5.0


def once(do: Callable[[], object]) -> Callable[[str], None]:
    """For a failpoint: the first time."""
    waiting = [do]

    def reach(_: str) -> None:
        if waiting:
            waiting.pop()()

    return reach


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def interpreters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is interrupted stands as a user's, in no fork of another process."""
    monkeypatch.setattr(Script, "preloaded", None)


# ---- what is held back


def test_interrupt_is_raised_at_the_end_of_what_is_held_together() -> None:
    interrupts, done = INTERRUPTS, []

    def held() -> None:
        with interrupts:
            with interrupts:
                interrupt()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupts:
        pass


def test_interrupt_is_raised_where_a_wait_can_be_given_up_and_once() -> None:
    interrupts, done = INTERRUPTS, []

    def held() -> None:
        with interrupts:
            interrupt()
            done.append("before")
            interrupts.check()
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == ["before"]
    interrupts.check()
    with interrupts:
        interrupts.check()


def test_second_interrupt_is_raised_at_once() -> None:
    done = []

    def held() -> None:
        with INTERRUPTS:
            interrupt()
            done.append("first")
            interrupt()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == ["first"]


def test_another_thread_is_not_interrupted_and_holds_nothing_back() -> None:
    interrupts = INTERRUPTS
    found: list[object] = []

    def elsewhere() -> None:
        with interrupts:
            found.append(signal.getsignal(signal.SIGINT))
        interrupts.check()

    def held() -> None:
        with interrupts:
            interrupt()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            found.append("held")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert found[1:] == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handler_of_the_script_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with INTERRUPTS:
            interrupt()
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_handler_stays_in_a_job_and_holds_back_only_what_is_held_together(connect: Connect) -> None:
    job = connect()
    ours = signal.getsignal(signal.SIGINT)
    assert ours is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with INTERRUPTS:
        assert signal.getsignal(signal.SIGINT) is ours
    job.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handler_comes_back_in_a_notebook_that_sets_pythons_own_for_each_cell(connect: Connect) -> None:
    job, done = connect(), []
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    time.sleep(2 * LOOK_AGAIN_S)

    def held() -> None:
        with INTERRUPTS:
            assert signal.getsignal(signal.SIGINT) is ours
            interrupt()
            done.append("held")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert done == ["held"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- a step


@pytest.mark.parametrize("place", ["push.before_apply", "push.after_partition", "push.before_publish"])
@pytest.mark.parametrize("settings", [{}, SYNC])
def test_promise_1_push_that_is_interrupted_inside_of_a_server_counts_whole(
    connect: Connect, settings: dict[str, Any], place: str
) -> None:
    job = connect(settings=settings)
    names = [f"v{index}" for index in range(4)]
    job.register({name: torch.zeros(16) for name in names}, lr=1.0)
    ones = {name: -torch.ones(16) for name in names}
    with armed(place, once(interrupt)), pytest.raises(KeyboardInterrupt):
        job.push(ones)
    job.push(ones)
    assert {name: set(value.tolist()) for name, value in job.pull().items()} == {name: {2.0} for name in names}
    assert job.step == 2


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_promise_2_interrupted_loop_has_counted_whole_batches(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 32)

    def loop() -> None:
        for number, (index,) in enumerate(counted.job.batches(counted.data, batch_size=4)):
            with armed("push.after_partition", once(interrupt) if number == 3 else lambda _: None):
                counted.step(index)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert sorted(counted.counts) == [0.0] * 16 + [1.0] * 16


def test_interrupt_between_two_batches_gives_back_the_data_shard() -> None:
    with local_yard({"job.workers_expected": 2}) as (_, connect):

        def script() -> None:
            with connect() as first:
                leaving = Counted(first, 24)
                for number, (index,) in enumerate(first.batches(leaving.data, batch_size=2)):
                    if number == 2:
                        interrupt()
                    leaving.step(index)

        with connect() as second:
            with pytest.raises(KeyboardInterrupt):
                script()
            staying = Counted(second, 24)
            for (index,) in second.batches(staying.data, batch_size=2):
                staying.step(index)
            assert staying.counts == [1.0] * 24


def test_wait_for_another_worker_is_given_up() -> None:
    with local_yard({"job.workers_expected": 2, **SYNC_2, "membership.heartbeat_ms": 50}) as (_, connect):
        button = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

        def script() -> None:
            with connect() as waiting:
                waiting.register({"w": torch.zeros(2)}, lr=1.0)
                idle.register({"w": torch.zeros(2)}, lr=1.0)
                button.start()
                for _ in range(2):
                    waiting.push({"w": torch.ones(2)})

        with connect() as idle:
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                script()
            assert time.monotonic() - begun < SOON_S
            button.join()


def test_answers_that_nobody_waited_for_are_not_those_to_the_next_question(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = connect()
    names = [f"v{index}" for index in range(4)]
    job.register({name: torch.zeros(16) for name in names}, lr=1.0)
    real, given_up = ServerStream.finish, []

    def finish(line: ServerStream, *given: Any, **named: Any) -> Any:
        if not given_up:
            given_up.append(line.server)
            raise KeyboardInterrupt
        return real(line, *given, **named)

    monkeypatch.setattr(ServerStream, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        job.pull()
    for count in range(1, 4):
        job.push({name: -torch.ones(16) for name in names})
        assert {name: set(value.tolist()) for name, value in job.pull().items()} == {name: {count} for name in names}


def test_push_of_which_nobody_knows_whether_it_has_arrived_is_not_followed_by_another(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = connect()
    job.register({"w": torch.zeros(4)}, lr=1.0)

    def twice_interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ServerGroup, "push_pull", twice_interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.push({"w": torch.ones(4)})
    with pytest.raises(errors.InvalidRequest, match="may have reached only some of the servers"):
        job.push({"w": torch.ones(4)})


# ---- beginning and ending


@pytest.mark.parametrize("method", [methods.REGISTER, methods.JOIN_JOB])
def test_interrupted_start_leaves_nothing_behind_and_the_next_one_works(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    reached: list[str] = []

    def reach(place: str) -> None:
        if not reached:
            reached.append(place)
            interrupt()

    with armed(f"reply.{method.name.lower()}", reach), pytest.raises(KeyboardInterrupt):
        connect()
    assert reached
    job = connect()
    job.register({"w": torch.zeros(1)}, lr=1.0)
    job.push({"w": torch.ones(1)})


def test_interrupted_end_is_an_end(connect: Connect) -> None:
    job = connect()
    job.register({"w": torch.zeros(1)}, lr=1.0)
    with armed("reply.leave", once(interrupt)), pytest.raises(KeyboardInterrupt):
        job.close()
    job.close()


# ---- over gRPC


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_yard(tmp_path_factory.mktemp("yard")) as cluster:
        yield cluster


@pytest.mark.long
def test_promise_2_others_go_on_when_a_script_is_interrupted(yard: LocalCluster, tmp_path: Path) -> None:
    with Probes(tmp_path) as probes:
        common = {"coordinator": yard.coordinator, "job": "interrupted", "job__workers_expected": 2}
        first, second = [probes.start("count", "--pause-ms", "20", **common) for _ in range(2)]
        first[0].wait_for("computed 4")
        begun = time.monotonic()
        first[0].process.send_signal(signal.SIGINT)
        code = first[0].process.wait(30)
        assert time.monotonic() - begun < SOON_S
        assert code != 0
        result = finish(*second)
        assert result["counts"] == [2.0] * 203
        assert any("KeyboardInterrupt" in line for line in first[0].lines)
