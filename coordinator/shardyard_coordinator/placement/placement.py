"""Places variables: cuts them into blocks, and puts blocks into partitions and partitions onto servers.

Owns: the decisions `fitting_block_bytes`, `whole_block_bytes`, `fitting_partitions`, `plan` and `assign`. Invariants:
each element of each variable is in exactly one block. Within a partition, blocks do not overlap, and they begin at
multiples of BLOCK_ALIGN_BYTES, as does what follows the payload. The layout depends only on its arguments, so not on
the number of servers (promise 6). Ties go to the lower index. Must not know: jobs, members, time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, TooLarge
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.layouts import (
    Block,
    JobLayout,
    PartitionLayout,
    PartitionMap,
    PartitionOwner,
    aligned_bytes,
)
from shardyard.domain.layout.shares import share_of
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_coordinator.placement.table_specs import fitted

BLOCK_BYTES_FITTING_MIN = limits.MIB
PARTITION_BYTES_FITTING_MIN = 256 * limits.KIB

_KINDS = tuple(VariableKind)
_DTYPES = tuple(DType)


@dataclass(frozen=True, slots=True)
class Server:
    """A server as placement sees it. `logs`: the folder of its logs. `leaves`: it leaves in order, and is given
    nothing. `hurries`: it has waited long enough for another server. `host`: the name of its machine, as it says."""

    incarnation: Incarnation
    address: str
    logs: str = ""
    leaves: bool = False
    hurries: bool = False
    host: str = ""


def staying(servers: Iterable[Server]) -> list[Server]:
    return [server for server in servers if not server.leaves]


def servers_of(map_: PartitionMap) -> list[tuple[Server, tuple[PartitionId, ...]]]:
    """The servers of a map, each with its partitions."""
    return [
        (Server(server, owned[0].address), tuple(owner.partition for owner in owned))
        for server, owned in map_.by_server().items()
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """`place`: of the worker that pushes it."""

    variable: int
    offset: int
    length: int
    payload_bytes: int
    place: int


def fitting_block_bytes(variables: Sequence[VariableSpec], *, partitions: int) -> int:
    """Half of a partition's fair share, within bounds. Variables up to that size stay whole, and no two partitions
    differ by more than that."""
    total = sum(spec.payload_bytes for spec in variables)
    return aligned_bytes(min(max(BLOCK_BYTES_FITTING_MIN, -(-total // (2 * partitions))), limits.GIB))


def whole_block_bytes(variables: Sequence[VariableSpec]) -> int:
    """The block size that leaves all parameters whole. Raises TooLarge if one does not fit into a block."""
    parameters = [spec for spec in variables if spec.kind is VariableKind.PARAMETER]
    for spec in parameters:
        if spec.elements > limits.BLOCK_ELEMENTS_MAX:
            raise TooLarge(
                f"variable {spec.name!r} of {spec.elements} elements in one block; at most "
                f"{limits.BLOCK_ELEMENTS_MAX} are taken",
                why="its optimizer needs the norm of the whole variable",
                todo="use an optimizer that works element by element, such as torch.optim.AdamW",
            )
    return aligned_bytes(max([BLOCK_ALIGN_BYTES, *(spec.payload_bytes for spec in parameters)]))


def fitting_partitions(variables: Sequence[VariableSpec], *, block_bytes: int, partitions_max: int) -> int:
    """As many partitions as have enough to hold, because each costs time with every push; at most one for each
    block."""
    filled = sum(spec.payload_bytes for spec in variables) // PARTITION_BYTES_FITTING_MIN
    return max(1, min(partitions_max, _blocks(variables, block_bytes), filled))


def plan(
    variables: Sequence[VariableSpec],
    optimizer: OptimizerSpec,
    tables: Sequence[TableSettings] = (),
    *,
    partitions: int,
    block_bytes: int,
    places: Sequence[int] = (),
    shares: int = 1,
) -> JobLayout:
    """Cuts variables of more than `block_bytes` into blocks of that size and spreads them over the partitions, the
    largest first, each to the partition with the fewest bytes (R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969: at most 4/3 of the best). A variable without elements has no block. `places`: for each variable,
    which worker pushes its gradients. Empty: each of `shares` workers pushes a share of each variable
    (shardyard.domain.layout.shares). A partition has what one of them pushes.

    Raises InvalidRequest without variables and tables, and for fewer partitions than places; TooLarge for too many
    blocks.
    """
    assert partitions >= 1, partitions
    assert block_bytes >= BLOCK_ALIGN_BYTES, block_bytes
    assert block_bytes % BLOCK_ALIGN_BYTES == 0, block_bytes
    if not variables and not tables:
        raise InvalidRequest(
            "a job without variables",
            why="there is nothing to train",
            todo="give job.prepare a model that has parameters",
        )
    blocks = _blocks(variables, block_bytes) + (shares - 1) * len(variables)
    if blocks > limits.BLOCKS_MAX:
        raise TooLarge(
            f"the variables make {blocks} blocks of {block_bytes} bytes; at most {limits.BLOCKS_MAX} are taken",
            todo="set job.block_bytes higher",
        )
    pieces = [
        piece
        for index, spec in enumerate(variables)
        for place, begin, end in _shares(spec, places[index] if places else None, shares)
        for piece in _cut(index, spec, begin, end, block_bytes, place)
    ]
    pieces.sort(key=lambda piece: (-piece.payload_bytes, piece.variable, piece.offset))
    held: list[list[_Piece]] = [[] for _ in range(partitions)]
    loads_of = _shared_out(pieces, sorted({*places}) or range(shares), partitions)
    for piece in pieces:
        loads = loads_of[piece.place]
        load, index = loads[0]
        held[index].append(piece)
        heapq.heapreplace(loads, (load + aligned_bytes(piece.payload_bytes), index))
    layouts = tuple(_lay_out(index, parts, variables) for index, parts in enumerate(held))
    return JobLayout(tuple(variables), optimizer, layouts, fitted(tables, partitions=partitions))


def _shares(spec: VariableSpec, place: int | None, count: int) -> list[tuple[int, int, int]]:
    """The places of the workers that push parts of a variable, and their elements [begin, end). `place`: that of the
    only one."""
    if place is not None:
        return [(place, 0, spec.elements)]
    return [(each, *share_of(spec, each, count)) for each in range(count)]


def _shared_out(pieces: Sequence[_Piece], places: Sequence[int], partitions: int) -> dict[int, list[tuple[int, int]]]:
    """The empty partitions of each place, by the bytes of what is pushed from it: one each, and then each to the place
    whose partitions have the most. Raises InvalidRequest."""
    nbytes = dict.fromkeys(places, 0)
    for piece in pieces:
        nbytes[piece.place] += piece.payload_bytes
    if len(nbytes) > partitions:
        raise InvalidRequest(
            f"{partitions} partitions for the variables of {len(nbytes)} workers of a replica",
            why="a partition has variables of one of them, which pushes to it",
            todo=f"set job.partitions to auto, or to {len(nbytes)} or more",
        )
    counts = dict.fromkeys(nbytes, 1)
    for _ in range(partitions - len(nbytes)):
        counts[max(nbytes, key=lambda place: nbytes[place] / counts[place])] += 1
    numbers = iter(range(partitions))
    return {place: [(0, next(numbers)) for _ in range(count)] for place, count in counts.items()}


def assign(payload_bytes: Sequence[int], servers: Sequence[Server], *, generation: Generation) -> PartitionMap:
    """Gives the partitions, in descending order of payload size, each to the server with the fewest bytes, then the
    fewest partitions. A server has none only if there are fewer partitions than servers."""
    by_number = sorted(staying(servers), key=lambda server: server.incarnation)
    assert by_number, "a map needs a server"
    loads = [(0, 0, index) for index in range(len(by_number))]
    owners: dict[int, Server] = {}
    for partition in sorted(range(len(payload_bytes)), key=lambda p: (-payload_bytes[p], p)):
        load, count, index = loads[0]
        owners[partition] = by_number[index]
        heapq.heapreplace(loads, (load + payload_bytes[partition], count + 1, index))
    return PartitionMap(
        generation,
        tuple(
            PartitionOwner(PartitionId(partition), owners[partition].incarnation, owners[partition].address)
            for partition in range(len(payload_bytes))
        ),
    )


def _blocks(variables: Sequence[VariableSpec], block_bytes: int) -> int:
    return sum(-(-spec.payload_bytes // block_bytes) for spec in variables)


def _cut(variable: int, spec: VariableSpec, begin: int, end: int, block_bytes: int, place: int) -> list[_Piece]:
    item_bytes = spec.dtype.item_bytes
    step = block_bytes // item_bytes
    pieces = []
    for offset in range(begin, end, step):
        length = min(step, end - offset)
        pieces.append(_Piece(variable, offset, length, length * item_bytes, place))
    return pieces


def _lay_out(partition: int, pieces: Sequence[_Piece], variables: Sequence[VariableSpec]) -> PartitionLayout:
    def place(piece: _Piece) -> tuple[int, int, int, int]:
        spec = variables[piece.variable]
        return _KINDS.index(spec.kind), _DTYPES.index(spec.dtype), piece.variable, piece.offset

    blocks = []
    position = 0
    for piece in sorted(pieces, key=place):
        blocks.append(Block(piece.variable, piece.offset, piece.length, position))
        position += aligned_bytes(piece.payload_bytes)
    return PartitionLayout(PartitionId(partition), position, tuple(blocks))
