"""The state that replicas publish, in a partition (docs/internals/ledger.md, rules D4 and D6)."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import NotReady
from shardyard.domain.pushes import Outcome
from shardyard.domain.replica_groups import TakenStep
from shardyard.wire.frames import Frame
from shardyard_ps_server.partition.checkpoint_cuts import take_cut
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.published_state import Publishing
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.values.versions import aligned_empty
from tests.support.rows_in_steps import current, moved, partition_of, push, work


def rows(given: dict[int, float]) -> Contribution:
    """A rank's rows, without its variables."""
    return work(given)._replace(payload=aligned_empty(0), present=(False,))


def publish(partition: Partition, step: int, value: float, group: int = 1) -> None:
    given = Publishing(partition, TakenStep(step, group), [step], [VALUES], current)
    given.add(Frame(b"", 0, np.full(16, value, np.float32).tobytes()))
    given.end()


def values(partition: Partition, number: int) -> float:
    found = hold_version(partition, number, True, 0.0)
    assert isinstance(found, tuple)
    try:
        return float(found[1].view(np.float32)[0])
    finally:
        partition.release(found[1])


def mirrored() -> Partition:
    return partition_of(2, mirrored=True)


def step(partition: Partition, number: int) -> None:
    assert push(partition, 0, number, rows({1: 1.0})) is Outcome.RECORDED
    assert push(partition, 1, number, rows({1: 1.0})) is Outcome.APPLIED


def test_rows_make_versions_and_variables_stay_as_they_were_published() -> None:
    partition = mirrored()
    step(partition, 0)
    once = moved(partition)[1]
    step(partition, 1)
    assert partition.versions.values is partition.versions.find(1), "nothing is copied"
    publish(partition, 2, 7.0)
    assert (values(partition, 1), values(partition, 2)) == (0.0, 7.0)
    step(partition, 2)
    assert (values(partition, 2), values(partition, 3)) == (7.0, 7.0)
    assert moved(partition) == {1: pytest.approx(3 * once)}


def test_published_state_keeps_a_contribution_to_the_next_step() -> None:
    """Of a member of a former group."""
    partition = mirrored()
    step(partition, 0)
    assert push(partition, 0, 1, rows({1: 1.0})) is Outcome.RECORDED
    publish(partition, 1, 7.0)
    assert push(partition, 0, 1, rows({1: 1.0})) is Outcome.DUPLICATE
    assert push(partition, 1, 1, rows({1: 1.0})) is Outcome.APPLIED


def test_state_of_another_step_than_the_rows_is_left_out() -> None:
    partition = mirrored()
    step(partition, 0)
    publish(partition, 0, 7.0)
    publish(partition, 2, 8.0)
    assert values(partition, 1) == 0.0


def test_cut_has_rows_and_variables_of_one_step_or_there_is_none() -> None:
    partition = mirrored()
    step(partition, 0)
    with pytest.raises(NotReady, match="has rows of step 1 and variables of step 0"):
        take_cut(partition)
    publish(partition, 1, 7.0)
    cut = take_cut(partition)
    cut.release()
    assert (partition.newest_cut, cut.version.number) == (1, 1)


def test_state_of_a_later_group_replaces_that_of_an_earlier_one() -> None:
    """Which may have lost all members that had taken the step."""
    partition = mirrored()
    step(partition, 0)
    for group, value in ((2, 7.0), (3, 8.0), (2, 9.0)):
        publish(partition, 1, value, group)
    assert values(partition, 1) == 8.0
