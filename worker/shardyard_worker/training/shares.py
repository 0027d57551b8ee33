"""What each worker of a replica pushes and pulls, where its workers push parts of a gradient (job.between
parameter_server).

In: the job's layout. Out: the partitions of the worker at each place, and the layout of what that worker has. Must not
know: how gradients are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

from shardyard.domain.errors import ConfigurationError
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.layout.shares import share_of, spec_of_share
from shardyard.domain.variables import VariableSpec


class Shares(ABC):
    """`count`: of the workers of a replica."""

    count: int
    places: Sequence[int] = ()
    """For each variable, the place of the worker that pushes it; empty: each pushes a share of it."""

    @abstractmethod
    def indices_at(self, place: int) -> list[int]:
        """The variables of which the worker at this place has elements."""

    @abstractmethod
    def layout_at(self, place: int, layout: JobLayout, own: Collection[PartitionId]) -> JobLayout:
        """The layout of what the worker at this place has, in its own partitions."""

    @abstractmethod
    def _places_of(self, block: Block) -> set[int]:
        """The places of the workers that push elements of a block."""

    def partitions(self, layout: JobLayout) -> list[set[PartitionId]]:
        """Those to which the worker at each place pushes. Those without variables are the first one's. Raises
        ConfigurationError if one has variables of several."""
        found: list[set[PartitionId]] = [set() for _ in range(self.count)]
        for part in layout.partitions:
            places = {place for block in part.blocks for place in self._places_of(block)}
            if len(places) > 1:
                raise ConfigurationError(
                    f"partition {part.partition} has variables of {len(places)} workers of a replica",
                    why="each of them pushes to partitions of its own, and the job's partitions were made for another"
                    " strategy, or for a model that was cut elsewhere",
                    todo="set job.between to all_reduce, which takes any partitions; or begin a new job with the values"
                    " (`shardyard checkpoint export`)",
                )
            found[min(places, default=0)].add(part.partition)
        return found


class WholeVariables(Shares):
    """Each worker has some of the variables, as a pipeline's workers do."""

    def __init__(self, places: Sequence[int], count: int) -> None:
        self.places = places
        self.count = count

    def indices_at(self, place: int) -> list[int]:
        return [at for at, each in enumerate(self.places) if each == place]

    def layout_at(self, place: int, layout: JobLayout, own: Collection[PartitionId]) -> JobLayout:  # noqa: ARG002
        return layout

    def _places_of(self, block: Block) -> set[int]:
        return {self.places[block.variable]}


class RowShares(Shares):
    """Each worker has a share of each variable (shardyard.domain.layout.shares)."""

    def __init__(self, specs: Sequence[VariableSpec], count: int) -> None:
        self._specs = specs
        self.count = count

    def indices_at(self, place: int) -> list[int]:
        return [at for at, spec in enumerate(self._specs) if spec_of_share(spec, place, self.count).elements]

    def layout_at(self, place: int, layout: JobLayout, own: Collection[PartitionId]) -> JobLayout:
        begins = [share_of(spec, place, self.count)[0] for spec in layout.variables]

        def shifted(part: PartitionLayout) -> PartitionLayout:
            blocks = part.blocks if part.partition in own else ()
            return replace(
                part, blocks=tuple(replace(each, offset=each.offset - begins[each.variable]) for each in blocks)
            )

        variables = tuple(spec_of_share(spec, place, self.count) for spec in layout.variables)
        return replace(layout, variables=variables, partitions=tuple(map(shifted, layout.partitions)))

    def _places_of(self, block: Block) -> set[int]:
        spec, end = self._specs[block.variable], block.offset + block.length
        shares = [share_of(spec, place, self.count) for place in range(self.count)]
        return {place for place, (begin, stop) in enumerate(shares) if block.offset < stop and begin < end}
