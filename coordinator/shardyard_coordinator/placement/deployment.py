"""How far a job's variables are on their way to the servers: registered, created, given first values, opened.

Owns: the layout, the map, which worker gives the first values, and the stage. Invariants: the first registration wins.
At most one worker at a time is the initializer, and none once the values are committed. No worker is told a layout
before all servers have its partitions. First values count only for the map under which they were given. Layout and map
are restored from records as they were decided, and are never planned again. Must not know: how servers are called,
leases of members.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardyard.checkpoints import layout as layouts
from shardyard.config.settings import JobSettings
from shardyard.domain import optimizers
from shardyard.domain.errors import InvalidRequest, NotReady, StaleGeneration
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.placement import layout_records, placement
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, Entry, require

OPEN_RETRY_MS = 1_000


class Stage(enum.Enum):
    """RESTORING: the partitions begin with a checkpoint. LOST: a server was lost with first values on which nothing
    depends yet; a worker gives them again. CREATING and OPENING: calls to servers are under way. UNCREATED and
    COMMITTED: these calls are due, or due again."""

    EMPTY = "no variables"
    RESTORING = "restoring"
    LOST = "lost"
    UNCREATED = "uncreated"
    CREATING = "creating"
    CREATED = "created"
    COMMITTED = "committed"
    OPENING = "opening"
    OPEN = "open"


_BEFORE_CREATED = (Stage.EMPTY, Stage.LOST, Stage.UNCREATED, Stage.CREATING)
_BEFORE_COMMIT = (*_BEFORE_CREATED, Stage.CREATED)
_CREATED: Entry = ("partitions_created", {})
_OPENED: Entry = ("partitions_opened", {})
RESTORED_LATER: Entry = ("partitions_restored_later", {})
"""The partitions of the registration before it begin with a checkpoint, not with first values."""


class Deployment:
    def __init__(self) -> None:
        self._registered: list[Incarnation] = []
        self._retry_at_ms = 0
        self._committer: Incarnation | None = None
        self.stage = Stage.EMPTY
        self.layout: JobLayout | None = None
        self.map: PartitionMap | None = None
        self.initializer: Incarnation | None = None

    @property
    def generation(self) -> Generation | None:
        return None if self.map is None else self.map.generation

    @property
    def is_committed(self) -> bool:
        """Whether the first values are on the servers for good, or a checkpoint has them."""
        return self.stage not in _BEFORE_COMMIT

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers that have a partition of the job."""
        return () if self.map is None else tuple(server for server, _ in placement.servers_of(self.map))

    @property
    def owners(self) -> frozenset[Incarnation]:
        """The same by their incarnations."""
        return frozenset(server.incarnation for server in self.servers)

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """The living workers that have the job's variables, in the order in which they got them."""
        return tuple(self._registered)

    def place(self, layout: JobLayout, servers: Sequence[Server], stage: Stage) -> None:
        """Takes the first registration, or the layout of a checkpoint (stage RESTORING)."""
        assert self.stage is Stage.EMPTY
        sizes = [part.payload_bytes for part in layout.partitions]
        self.map = placement.assign(sizes, servers, generation=Generation(1))
        self.layout, self.stage = layout, stage

    def lose_values(self) -> None:
        """A server left or died before anything depended on the first values. The worker that gave them, or was about
        to, gives them again if it lives."""
        assert self.stage not in (Stage.EMPTY, Stage.RESTORING), self.stage
        self.stage = Stage.LOST
        if self.initializer is None:
            given = [worker for worker in self._registered if worker == self._committer]
            self.initializer = next(iter([*given, *self._registered]), None)
        self._committer = None

    def place_again(self, map_: PartitionMap) -> None:
        """The partitions begin again, with zeros, under this map."""
        assert self.stage is Stage.LOST, self.stage
        self.map, self.stage = map_, Stage.UNCREATED

    # ---- workers

    def admit(self, worker: Incarnation) -> list[Entry]:
        """The worker has the job's variables. It may have to give the first values."""
        if worker in self._registered:
            return []
        self._registered = sorted([*self._registered, worker])
        return [_of_worker("worker_admitted", worker), *self._choose_initializer()]

    def may_initialize(self, worker: Incarnation) -> bool:
        """Whether the worker gives the first values, or may have to."""
        return self.stage in _BEFORE_COMMIT and self.initializer in (worker, None)

    def remove(self, worker: Incarnation) -> list[Entry]:
        """The worker departed and is fenced. Another worker may have to give the first values."""
        self.forget(worker)
        return self._choose_initializer()

    def forget(self, worker: Incarnation) -> None:
        """The first half of `remove`: nothing is expected of the worker any more."""
        self.suspend(worker)
        if self.initializer == worker:
            self.initializer = None

    def suspend(self, worker: Incarnation) -> None:
        """The worker departed and is not fenced yet. No other worker may begin what this one may still be doing."""
        self._registered = [each for each in self._registered if each != worker]

    # ---- creation, commit, opening

    def begin_creation(self) -> bool:
        """Whether servers are to be given their partitions now. If so, the creation counts as under way. Raises
        NotReady while it is, or while the job waits for a server."""
        if self.stage is Stage.LOST:
            raise NotReady("a server is gone, and the first values with it: the partitions wait for another server")
        if self.stage is Stage.CREATING:
            raise NotReady("the servers are being given their partitions", why="the map is shown once they have them")
        if self.stage is not Stage.UNCREATED:
            return False
        self.stage = Stage.CREATING
        return True

    def end_creation(self, generation: Generation, *, created: bool) -> list[Entry]:
        """The servers' answer to a creation under the map of that generation."""
        if self.stage is not Stage.CREATING or generation != self.generation:
            return []
        self.stage = Stage.CREATED if created else Stage.UNCREATED
        return [_CREATED] if created else []

    def check_commit(self, worker: Incarnation, generation: Generation) -> None:
        """The worker has given first values under the map of that generation. Raises InvalidRequest, NotReady, and
        StaleGeneration if the values were lost since."""
        if self._committer == worker:
            return  # and partitions may have moved since, with the values
        if self.initializer != worker:
            raise InvalidRequest(
                f"worker {worker} committed first values; expected worker {self.initializer or self._committer}",
                todo="only the worker that was told to be the initializer commits; the others pull",
            )
        if generation != self.generation:
            raise StaleGeneration(
                f"first values of generation {generation}; the partitions are at {self.generation}",
                why="a server has died since",
                facts={"generation": str(self.generation)},
            )
        if self.stage in _BEFORE_CREATED:
            raise NotReady("the servers do not have their partitions yet")

    def commit(self, worker: Incarnation) -> list[Entry]:
        """The first values are on the servers for good."""
        if self.stage is not Stage.CREATED:
            return []
        self.stage, self.initializer, self._committer = Stage.COMMITTED, None, worker
        return [_of_worker("variables_committed", worker)]

    def begin_opening(self) -> bool:
        """Whether servers are to open their partitions now. If so, the opening counts as under way. Raises NotReady
        while it is."""
        if self.stage is Stage.OPENING:
            raise NotReady("the servers are opening their partitions")
        if self.stage is not Stage.COMMITTED:
            return False
        self.stage = Stage.OPENING
        return True

    def is_opening_due(self, now_ms: int) -> bool:
        """Whether opening has failed, and it is time to try again."""
        return self.stage is Stage.COMMITTED and now_ms >= self._retry_at_ms

    def end_opening(self, generation: Generation, *, opened: bool, now_ms: int) -> list[Entry]:
        """The servers' answer to an opening under the map of that generation."""
        if self.stage is not Stage.OPENING or generation != self.generation:
            return []
        self.stage = Stage.OPEN if opened else Stage.COMMITTED
        self._retry_at_ms = now_ms + OPEN_RETRY_MS
        return [_OPENED] if opened else []

    def _choose_initializer(self) -> list[Entry]:
        if self.initializer is not None or self.stage not in _BEFORE_COMMIT or not self._registered:
            return []
        self.initializer = self._registered[0]
        return [_of_worker("initializer_chosen", self.initializer)]

    # ---- records

    @property
    def registered(self) -> Entry:
        """The record of the first registration, with what was decided about it."""
        assert self.layout is not None
        kind, body = self.with_map("variables_registered")
        return kind, {"layout": layouts.to_document(self.layout), **body}

    def with_map(self, kind: str) -> Entry:
        """A record of that kind that has the map."""
        assert self.map is not None
        return kind, {"map": layout_records.map_to_record(self.map)}

    def entries(self) -> list[Entry]:
        """Records that rebuild this deployment, except `suspend`."""
        if self.layout is None:
            return []
        admitted = [_of_worker("worker_admitted", worker) for worker in self._registered]
        if self.stage is Stage.RESTORING or (self.stage is Stage.OPEN and self._committer is None):
            entries = [self.registered, RESTORED_LATER, *admitted]
        else:
            entries = [self.registered, *admitted]
            if self.initializer is not None:
                entries.append(_of_worker("initializer_chosen", self.initializer))
            if self.stage not in _BEFORE_CREATED:
                entries.append(_CREATED)
            if self._committer is not None:
                entries.append(_of_worker("variables_committed", self._committer))
        return [*entries, _OPENED] if self.stage is Stage.OPEN else entries

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Calls to servers that were under way are due again. Raises DamagedRecord."""
        if kind == "variables_registered":
            require(self.stage is Stage.EMPTY, "variables are registered twice")
            self.layout = layout_records.layout_of_record(body)
            self.map = self._read_map(body)
            self.stage = Stage.UNCREATED
            return
        require(self.stage is not Stage.EMPTY, "there are no variables yet")
        match kind:
            case "worker_admitted":
                self._registered = sorted({*self._registered, Incarnation(body.number("worker", least=1))})
            case "initializer_chosen":
                self.initializer = Incarnation(body.number("worker", least=1))
            case "partitions_moved":
                self.map = self._read_map(body)
            case "partitions_placed_again":
                require(self.stage is Stage.LOST, f"first values are given again, and the stage is {self.stage.value}")
                self.place_again(self._read_map(body))
            case "partitions_restored_later":
                require(self.stage is Stage.UNCREATED, "partitions are to be restored that are there")
                self.stage = Stage.RESTORING
            case "partitions_created":
                require(self.stage is Stage.UNCREATED, "partitions are created twice")
                self.stage = Stage.CREATED
            case "variables_committed":
                require(self.stage is Stage.CREATED, f"first values are committed, and the stage is {self.stage.value}")
                self.commit(Incarnation(body.number("worker", least=1)))
            case _:
                due = (Stage.COMMITTED, Stage.RESTORING)
                require(self.stage in due, f"partitions are opened, and the stage is {self.stage.value}")
                self.stage = Stage.OPEN

    def _read_map(self, body: Body) -> PartitionMap:
        assert self.layout is not None
        return layout_records.map_of_record(body, len(self.layout.partitions))


def plan(
    settings: JobSettings,
    variables: Sequence[VariableSpec],
    optimizer: OptimizerSpec,
    tables: Sequence[TableSettings] = (),
    places: Sequence[int] = (),
) -> JobLayout:
    """The layout of the first registration. Raises what placement.plan raises."""
    partitions, wanted = settings.partition_count, settings.block_bytes
    block_bytes = placement.fitting_block_bytes(variables, partitions=partitions) if wanted == "auto" else wanted
    if optimizer.kind in optimizers.WHOLE_VARIABLES:
        block_bytes = max(block_bytes, placement.whole_block_bytes(variables))
    if settings.partitions == "auto":
        if not tables:  # rows fill any number of partitions
            partitions = placement.fitting_partitions(variables, block_bytes=block_bytes, partitions_max=partitions)
        partitions = max(partitions, len({*places}), settings.shares)
    return placement.plan(
        variables,
        optimizer,
        tables,
        partitions=partitions,
        block_bytes=block_bytes,
        places=places,
        shares=settings.shares,
    )


def _of_worker(kind: str, worker: Incarnation) -> Entry:
    return kind, {"worker": worker}
