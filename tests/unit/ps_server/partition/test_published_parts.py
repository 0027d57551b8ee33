"""The state that workers publish, each what it has of the variables (docs/internals/ledger.md, rules D4 and D7)."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.replica_groups import TakenStep
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire.frames import Frame
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.published_state import Publishing
from shardyard_ps_server.partition.update_rules import UpdateRules

LAYOUT = JobLayout(
    (VariableSpec("a", DType.FLOAT64, (8,)), VariableSpec("b", DType.FLOAT64, (8,))),
    OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)),
    (PartitionLayout(PartitionId(0), 128, (Block(0, 0, 8, 0), Block(1, 0, 8, 64))),),
)


@pytest.fixture
def partition() -> Partition:
    made = Partition(LAYOUT, PartitionId(0), UpdateRules(UpdateMode.SYNC, logical_ranks=1))
    made.is_open = True
    return made


def give(partition: Partition, block: int, step: int, value: float, group: int = 1, elements: int = 8) -> None:
    """The last elements of a block."""
    values = np.full(elements, value)
    counts = [step if each == block else 0 for each in range(2)]
    given = Publishing(partition, TakenStep(step, group), counts, [VALUES], lambda: None)
    given.add(Frame(b"", 64 * (block + 1) - values.nbytes, values.tobytes()))
    given.end()


def newest(partition: Partition) -> tuple[int, float, float]:
    values = partition.versions.values.view(np.float64)
    return partition.versions.newest.number, float(values[0]), float(values[8])


def test_partition_takes_a_state_when_it_has_all_blocks(partition: Partition) -> None:
    before = newest(partition)
    give(partition, 1, 5, 2.0)
    give(partition, 1, 5, 2.0)
    assert newest(partition) == before
    give(partition, 0, 5, 1.0)
    assert newest(partition) == (5, 1.0, 2.0)
    assert partition.draft is None


def test_workers_may_give_parts_of_a_block(partition: Partition) -> None:
    give(partition, 0, 5, 1.0)
    give(partition, 1, 5, 2.0, elements=3)
    assert newest(partition)[0] == 0
    give(partition, 1, 5, 2.0)
    assert newest(partition) == (5, 1.0, 2.0)


@pytest.mark.parametrize("later", [(6, 1), (5, 2)], ids=["step", "group"])
def test_state_is_of_one_step_and_group(partition: Partition, later: tuple[int, int]) -> None:
    give(partition, 0, 5, 1.0)
    step, group = later
    give(partition, 1, step, 4.0, group)
    give(partition, 0, 5, 1.0)  # of a member that is late
    assert newest(partition)[0] == 0
    give(partition, 0, step, 3.0, group)
    assert newest(partition) == (step, 3.0, 4.0)
