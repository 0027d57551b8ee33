"""The blocks of one partition: what comes in, and updates against plain numpy and torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_ps_server.partition import dense_state
from shardyard_ps_server.partition.contribution import PayloadLayout
from shardyard_ps_server.partition.dense_state import Contribution, DenseState
from shardyard_ps_server.values.versions import Bytes, aligned_empty

Values = Mapping[str, Sequence[float]]
SGD = (make_group("sgd", {"lr": 1.0}),)


def variable(name: str, length: int, dtype: DType = DType.FLOAT64, group: int = 0) -> VariableSpec:
    return VariableSpec(name, dtype, (length,), group=group)


def buffer(name: str, length: int, dtype: DType) -> VariableSpec:
    return VariableSpec(name, dtype, (length,), VariableKind.BUFFER)


class OnePartition:
    """Variables of one partition, each one block, under the DenseState that are tried."""

    def __init__(self, *variables: VariableSpec, kind: str = "sgd", groups: dense_state.Groups = SGD) -> None:
        self.variables = variables
        self.groups = groups
        position, laid = 0, []
        for index, spec in enumerate(variables):
            laid.append(Block(index, 0, spec.elements, position))
            position += aligned_bytes(spec.payload_bytes)
        self.layout = PartitionLayout(PartitionId(0), position, tuple(laid))
        layout = JobLayout(variables, OptimizerSpec(kind, groups), (self.layout,))
        self.payload = PayloadLayout(layout, self.layout)
        self.blocks = DenseState(layout, self.payload)
        self.values = aligned_empty(position)
        self.values[:] = 0

    def of(self, payload: Bytes, index: int) -> np.ndarray:
        spec, block = self.variables[index], self.layout.blocks[index]
        return payload[block.position : block.position + spec.payload_bytes].view(spec.dtype.value)

    def start(self, **values: Sequence[float]) -> None:
        for index, spec in enumerate(self.variables):
            self.of(self.values, index)[:] = values[spec.name]

    def push(self, weight: float = 1.0, **values: Sequence[float]) -> Contribution:
        """A contribution as it comes off the wire; variables not named are absent, filling is rubbish."""
        packed, absent = [], []
        for index, spec in enumerate(self.variables):
            if spec.name not in values:
                absent.append(index)
                continue
            room = np.full(aligned_bytes(spec.payload_bytes), 0xFF, np.uint8)
            room[: spec.payload_bytes].view(spec.dtype.value)[:] = values[spec.name]
            packed.append(room)
        payload = aligned_empty(sum(room.size for room in packed))
        payload[:] = np.concatenate([*packed, np.empty(0, np.uint8)])
        part = PushPart(PartitionId(0), payload.size, tuple(absent))
        assert self.payload.expected_bytes(part) == payload.size
        full, present = self.payload.unpack(part, payload)
        return Contribution(weight, self.groups, full, present)

    def update(
        self, *members: Contribution, shares: Sequence[float] | None = None, skips: bool = False
    ) -> dict[str, np.ndarray]:
        total = sum(member.weight for member in members)
        new = aligned_empty(self.values.size)
        new[:] = 0xEE
        before = self.values.tobytes()
        shares = shares or [member.weight / total for member in members]
        self.blocks.update(members, shares, self.values, new, skips=skips)
        assert self.values.tobytes() == before
        self.values = new
        return {spec.name: self.of(new, index) for index, spec in enumerate(self.variables)}


# ---- what comes in


def test_absent_blocks_are_left_out_of_the_payload_with_their_filling() -> None:
    one = OnePartition(variable("a", 3), variable("b", 9), variable("c", 1, DType.FLOAT32))
    whole = aligned_bytes(24) + aligned_bytes(72) + aligned_bytes(4)
    assert one.payload.expected_bytes(PushPart(PartitionId(0), whole)) == whole
    assert one.payload.expected_bytes(PushPart(PartitionId(0), 1, (1,))) == whole - aligned_bytes(72)
    assert one.payload.expected_bytes(PushPart(PartitionId(0), 1, (0, 1, 2))) == 0


def test_part_without_payload_has_no_gradient_for_any_block() -> None:
    one = OnePartition(variable("a", 3), variable("b", 9))
    part = PushPart(PartitionId(0), 0)
    assert one.payload.expected_bytes(part) == 0
    assert one.payload.unpack(part, aligned_empty(0))[1] == (False, False)


@pytest.mark.parametrize("absent", [(3,), (1, 1), (2, 0), (0, 1, 2, 3), (1 << 40,)])
def test_absent_blocks_must_exist_and_ascend(absent: tuple[int, ...]) -> None:
    one = OnePartition(variable("a", 3), variable("b", 9), variable("c", 1))
    for payload_bytes in (0, 64):
        with pytest.raises(MalformedPayload, match="of partition 0, which has 3; expected ascending"):
            one.payload.expected_bytes(PushPart(PartitionId(0), payload_bytes, absent))


# ---- updates


def test_update_without_members_keeps_all_values() -> None:
    one = OnePartition(variable("a", 3), buffer("n", 2, DType.INT64))
    one.start(a=[1, 2, 3], n=[4, 5])
    after = one.update(shares=())
    assert after["a"].tolist() == [1, 2, 3]
    assert after["n"].tolist() == [4, 5]


def test_single_member_steps_along_its_gradient() -> None:
    one = OnePartition(variable("a", 3))
    one.start(a=[10, 20, 30])
    assert one.update(one.push(a=[1, 2, 3]))["a"].tolist() == [9, 18, 27]


def test_frozen_variable_begins_its_own_count_when_it_is_thawed_as_in_torch() -> None:
    rng = np.random.default_rng(5)
    group = {"lr": 0.1, "weight_decay": 0.01}
    one = OnePartition(
        variable("a", 7), variable("b", 7), variable("c", 7), kind="adam", groups=(make_group("adam", group),)
    )
    first = {name: rng.standard_normal(7) for name in "abc"}
    one.start(**first)
    theirs = {name: torch.nn.Parameter(torch.from_numpy(first[name].copy())) for name in "abc"}
    adam = torch.optim.Adam(theirs.values(), **group)
    for step in range(12):
        having = [name for name in "abc" if name == "a" or (name == "b" and step >= 4) or (name == "c" and step % 3)]
        gradients = {name: rng.standard_normal(7) for name in having}
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(gradients[name].copy()) if name in gradients else None
        adam.step()
        after = one.update(one.push(**gradients))
        for name, parameter in theirs.items():
            np.testing.assert_allclose(after[name], parameter.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_what_is_not_finite_goes_through_in_silence() -> None:
    one = OnePartition(variable("a", 3, DType.FLOAT32), buffer("mean", 1, DType.FLOAT32))
    huge = float(np.finfo(np.float32).max)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members = [
            one.push(2, a=[np.inf, huge, np.nan], mean=[np.inf]),
            one.push(1, a=[-np.inf, huge, 1], mean=[-np.inf]),
        ]
        after = one.update(*members, shares=(1.0, 1.0))
    assert np.isnan(after["a"]).tolist() == [True, False, True]
    assert after["a"][1] == -np.inf


def test_partition_without_blocks_is_updated_to_nothing() -> None:
    one = OnePartition()
    one.update(one.push(), one.push())
    assert one.values.size == 0


@pytest.mark.parametrize("members", [1, 2, 3])
def test_payload_of_many_pieces_is_updated_as_a_whole_one(members: int) -> None:
    elements = 3 * dense_state.PIECE_BYTES // 4 + 5
    one = OnePartition(variable("a", elements, DType.FLOAT32), buffer("mean", elements, DType.FLOAT32))
    rng = np.random.default_rng(6)
    pushed = rng.standard_normal((members, elements)).astype(np.float32)
    after = one.update(*(one.push(1, a=each, mean=each) for each in pushed))
    share = np.float32(1 / members)
    total = pushed[0] * share
    for each in pushed[1:]:
        total = total + each * share
    assert after["mean"].tobytes() == total.tobytes()
    assert after["a"].tobytes() == (-total).tobytes()


def test_sums_take_no_memory_of_the_size_of_the_payload() -> None:
    one = OnePartition(variable("a", 1 << 20))
    asked: list[int] = []

    def recorded(nbytes: int) -> Bytes:
        asked.append(nbytes)
        return aligned_empty(nbytes)

    members = [one.push(1, a=[1] * (1 << 20)) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_state, "aligned_empty", recorded)
        one.update(*members)
    assert asked == [dense_state.PIECE_BYTES]


def test_payload_that_may_not_be_written_is_read() -> None:
    one = OnePartition(variable("a", 2))
    pushed = one.push(a=[1, 2])
    pushed.payload.flags.writeable = False
    assert one.update(pushed)["a"].tolist() == [-1, -2]


def test_payload_of_another_length_or_in_the_values_is_a_defect_of_the_caller() -> None:
    one = OnePartition(variable("a", 9))
    pushed, new = one.push(a=[1] * 9), aligned_empty(one.values.size)
    for payload in (pushed.payload[:64], new):
        with pytest.raises(AssertionError):
            one.blocks.update([pushed._replace(payload=payload)], [1.0], one.values, new)


def test_memory_of_an_update_can_be_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OnePartition(variable("a", 2))
    members = [one.push(1, a=[2, 4]), one.push(1, a=[2, 4])]

    def none_left(nbytes: int) -> Bytes:
        raise TooLarge(f"{nbytes} bytes")

    one.blocks.reserve_sums()
    new = aligned_empty(one.values.size)
    monkeypatch.setattr(dense_state, "aligned_empty", none_left)
    one.blocks.update(members, (0.5, 0.5), one.values, new)
    assert one.of(new, 0).tolist() == [-2, -4]


def test_rule_b6_skipped_update_sets_buffers_and_nothing_else_changes_to_the_bit() -> None:
    """Adam tells whether anything has counted: its next update depends on how many there were."""
    kind, groups = "adam", (make_group("adam", {"lr": 0.1}),)
    made = [
        OnePartition(
            variable("a", 3), buffer("m", 2, DType.FLOAT32), buffer("n", 1, DType.INT64), kind=kind, groups=groups
        )
        for _ in range(2)
    ]
    skipped, plain = made
    for each in made:
        each.start(a=[1, 2, 3], m=[0, 0], n=[5])
        each.update(each.push(a=[1, -1, 2], m=[1, 1], n=[6]))
    before = skipped.blocks.arrays(0, skipped.values)
    state = {name: values.tobytes() for name, values in before.items()}
    members = [
        skipped.push(3.0, a=[np.nan, 1, np.inf], m=[2, 4], n=[7]),
        skipped.push(1.0, m=[6, 8], n=[9])._replace(overflow=True),
    ]
    found = skipped.update(*members, skips=True)
    assert {name: values.tobytes() for name, values in skipped.blocks.arrays(0, skipped.values).items()} == state
    assert (found["m"].tolist(), found["n"].tolist()) == ([3, 5], [9])
    assert skipped.blocks.counts.tolist() == [1, 2, 2]
    for each in made:
        each.update(each.push(a=[0.5, 0.5, 0.5], m=[1, 1], n=[1]))
    assert skipped.of(skipped.values, 0).tobytes() == plain.of(plain.values, 0).tobytes()
