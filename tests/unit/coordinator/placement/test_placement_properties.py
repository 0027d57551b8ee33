"""Placement held against plain counting, for any variables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.wire import layout_messages
from shardyard_coordinator.placement.placement import Server, assign, fitting_block_bytes, plan
from shardyard_worker.training.shares import RowShares

SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))

shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
variables = st.lists(
    st.tuples(st.sampled_from(list(DType)), shapes, st.sampled_from(list(VariableKind))), min_size=1, max_size=12
).map(
    lambda given: tuple(
        VariableSpec(
            f"v{index}",
            dtype,
            shape,
            kind if dtype.is_floating else VariableKind.BUFFER,
        )
        for index, (dtype, shape, kind) in enumerate(given)
    )
)
block_sizes = st.integers(1, 8).map(lambda count: count * BLOCK_ALIGN_BYTES)


@given(variables, st.integers(1, 9), block_sizes)
def test_each_element_is_in_exactly_one_block(
    specs: tuple[VariableSpec, ...], partitions: int, block_bytes: int
) -> None:
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes)
    found = [
        (block.variable, element)
        for part in layout.partitions
        for block in part.blocks
        for element in range(block.offset, block.offset + block.length)
    ]
    wanted = [(index, element) for index, spec in enumerate(specs) for element in range(spec.elements)]
    assert sorted(found) == wanted
    for part in layout.partitions:
        for block in part.blocks:
            assert block.length * specs[block.variable].dtype.item_bytes <= block_bytes
            assert block.position % BLOCK_ALIGN_BYTES == 0


@given(variables, st.integers(1, 9), block_sizes)
def test_layout_passes_the_check_at_the_door(
    specs: tuple[VariableSpec, ...], partitions: int, block_bytes: int
) -> None:
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes)
    assert layout_messages.layout_from_wire(layout_messages.layout_to_wire(layout)) == layout


@given(variables, st.integers(1, 9), block_sizes)
def test_no_partition_is_fuller_than_another_by_more_than_a_block(
    specs: tuple[VariableSpec, ...], partitions: int, block_bytes: int
) -> None:
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes)
    sizes = [part.payload_bytes for part in layout.partitions]
    assert max(sizes) - min(sizes) <= block_bytes
    assert isinstance(layout, JobLayout)


@given(st.lists(st.integers(0, 40 << 20), min_size=1, max_size=12), st.integers(1, 9))
def test_fitting_blocks_are_balanced_to_half_a_fair_share(elements: list[int], partitions: int) -> None:
    specs = tuple(VariableSpec(f"v{index}", DType.FLOAT32, (count,)) for index, count in enumerate(elements))
    block_bytes = fitting_block_bytes(specs, partitions=partitions)
    assert block_bytes % BLOCK_ALIGN_BYTES == 0
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes)
    sizes = [part.payload_bytes for part in layout.partitions]
    fair = sum(sizes) / partitions
    assert max(sizes) - min(sizes) <= max(1 << 20, fair / 2 + BLOCK_ALIGN_BYTES)


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=30), st.integers(1, 12))
def test_each_partition_has_an_owner_and_no_server_is_idle_without_need(sizes: list[int], count: int) -> None:
    servers = [Server(Incarnation(index + 1), f"s:{index}") for index in range(count)]
    map_ = assign(sizes, servers, generation=Generation(1))
    assert [owner.partition for owner in map_.owners] == list(range(len(sizes)))
    loads = {server: sum(sizes[owner.partition] for owner in owned) for server, owned in map_.by_server().items()}
    assert len(loads) == min(count, len(sizes))
    if len(sizes) >= count:
        assert max(loads.values()) - min(loads.values()) <= max(sizes)


@given(variables, st.integers(3, 9), block_sizes, st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_partitions_have_variables_of_one_place(
    specs: tuple[VariableSpec, ...], partitions: int, block_bytes: int, drawn: list[int]
) -> None:
    places = drawn[: len(specs)]
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes, places=places)
    assert len(layout.partitions) == partitions
    found = [{places[block.variable] for block in part.blocks} for part in layout.partitions]
    assert max(map(len, found)) <= 1
    assert {place for each in found for place in each} == {
        place for place, spec in zip(places, specs, strict=True) if spec.elements
    }
    assert layout_messages.layout_from_wire(layout_messages.layout_to_wire(layout)) == layout


@given(variables, st.integers(4, 9), block_sizes, st.integers(1, 4))
def test_partitions_have_the_shares_of_one_place(
    specs: tuple[VariableSpec, ...], partitions: int, block_bytes: int, count: int
) -> None:
    layout = plan(specs, SGD, partitions=partitions, block_bytes=block_bytes, shares=count)
    assert layout_messages.layout_from_wire(layout_messages.layout_to_wire(layout)) == layout
    shares = RowShares(specs, count)
    owned = shares.partitions(layout)
    assert sorted(partition for each in owned for partition in each) == [*range(partitions)]
    for place, own in enumerate(owned):
        here = shares.layout_at(place, layout, own)
        elements = [0] * len(specs)
        for part in here.partitions:
            assert not part.blocks or part.partition in own
            for block in part.blocks:
                assert 0 <= block.offset <= block.offset + block.length <= here.variables[block.variable].elements
                elements[block.variable] += block.length
        assert elements == [spec.elements for spec in here.variables]
        assert shares.indices_at(place) == [at for at, found in enumerate(elements) if found]
