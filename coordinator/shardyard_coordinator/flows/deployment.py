"""A job's variables on their way to the servers: registered, created, given first values, opened.

Owns: the layout, the map, who gives the first values, which stage it is at. Invariants: the first registration wins;
at most one worker at a time is the initializer, and none once the values are committed; nobody is told a layout before
all servers have its partitions; first values count for the map under which they were given; layout and map come back
from records as they were decided, never planned anew.
Must not know: how servers are called, members' leases.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardyard.config.settings import JobSettings
from shardyard.domain import optimizers
from shardyard.domain.errors import InvalidRequest, NotReady, StaleGeneration, VariableConflict
from shardyard.domain.ids import Generation, Incarnation, JobId
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.core.effects import CreatePartitions, OpenPartitions, VariablesPlaced
from shardyard_coordinator.placement import layout_records, placement
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.placement.table_specs import check_same
from shardyard_coordinator.records import Body, Entry, require

OPEN_RETRY_MS = 1_000


class Stage(enum.Enum):
    """RESTORING: the partitions begin with a checkpoint. LOST: a server is gone, and with it first values, on which
    nothing was built yet; they are to be given again, on others. CREATING and OPENING: calls to servers are under way.
    UNCREATED, COMMITTED: they are due (again)."""

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
    def __init__(self, job: JobId, settings: JobSettings) -> None:
        self._job = job
        self._settings = settings
        self._switches = 0
        self._registered: list[Incarnation] = []
        self._retry_at_ms = 0
        self._committer: Incarnation | None = None
        self.stage = Stage.EMPTY
        self.layout: JobLayout | None = None
        self.map: PartitionMap | None = None
        self.initializer: Incarnation | None = None

    def go_by(self, settings: JobSettings, switches: int) -> None:
        """As of the job's switch of that number."""
        self._settings, self._switches = settings, switches

    @property
    def generation(self) -> Generation | None:
        return None if self.map is None else self.map.generation

    @property
    def servers(self) -> tuple[Server, ...]:
        """Those with a partition of the job."""
        if self.map is None:
            return ()
        return tuple(Server(server, owned[0].address) for server, owned in self.map.by_server().items())

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """The living ones whose model is the job's, the first one first."""
        return tuple(self._registered)

    def check(
        self, variables: Sequence[VariableSpec], optimizer: OptimizerSpec, tables: Sequence[TableSettings] = ()
    ) -> None:
        """Raises VariableConflict unless the registration is equal to the first one."""
        assert self.layout is not None
        check_registration(self.layout, variables, optimizer, tables)

    def place(
        self,
        variables: Sequence[VariableSpec],
        optimizer: OptimizerSpec,
        servers: Sequence[Server],
        tables: Sequence[TableSettings] = (),
    ) -> None:
        """Takes the first registration. Raises what placement raises, NotReady without a server."""
        assert self.stage is Stage.EMPTY
        if not servers:
            raise NotReady(
                "no server has registered yet",
                why="the variables need a server to lie on",
                todo="start one with `shardyard server`; the worker asks again by itself",
            )
        partitions, wanted = self._settings.partition_count, self._settings.block_bytes
        block_bytes = placement.fitting_block_bytes(variables, partitions=partitions) if wanted == "auto" else wanted
        if optimizer.kind in optimizers.WHOLE_VARIABLES:
            block_bytes = max(block_bytes, placement.whole_block_bytes(variables))
        if self._settings.partitions == "auto" and not tables:  # rows fill any number
            partitions = placement.fitting_partitions(variables, block_bytes=block_bytes, partitions_max=partitions)
        layout = placement.plan(variables, optimizer, tables, partitions=partitions, block_bytes=block_bytes)
        sizes = [part.payload_bytes for part in layout.partitions]
        self.map = placement.assign(sizes, servers, generation=Generation(1))
        self.layout = layout
        self.stage = Stage.UNCREATED

    def place_as(self, layout: JobLayout, servers: Sequence[Server]) -> None:
        """Takes the layout of a checkpoint, with which the partitions are to begin."""
        assert self.stage is Stage.EMPTY
        sizes = [part.payload_bytes for part in layout.partitions]
        self.layout, self.map = layout, placement.assign(sizes, servers, generation=Generation(1))
        self.stage = Stage.RESTORING

    def restored(self) -> None:
        """All partitions are as a checkpoint has them, and open."""
        self.stage = Stage.OPEN

    def lose_values(self) -> None:
        """A server is gone before anything was built on the first values. Whoever has given them, or was to, gives them
        again if it lives."""
        assert self.stage not in (Stage.EMPTY, Stage.RESTORING), self.stage
        self.stage = Stage.LOST
        if self.initializer is None:
            given = [worker for worker in self._registered if worker == self._committer]
            self.initializer = next(iter([*given, *self._registered]), None)
        self._committer = None

    def place_again(self, map_: PartitionMap) -> None:
        """The partitions are to begin anew, with zeros, under this map."""
        assert self.stage is Stage.LOST, self.stage
        self.map, self.stage = map_, Stage.UNCREATED

    def admit(self, worker: Incarnation) -> list[Entry]:
        """The worker's model is the job's; it may have to give the first values."""
        if worker in self._registered:
            return []
        self._registered = sorted([*self._registered, worker])
        return [_admitted(worker), *self._choose_initializer()]

    def is_for(self, worker: Incarnation) -> bool:
        """Whether the worker gives the first values, or may have to."""
        return self.stage in _BEFORE_COMMIT and self.initializer in (worker, None)

    def remove(self, worker: Incarnation) -> list[Entry]:
        """The worker is gone and fenced. Another one may have to give the first values."""
        self.forget(worker)
        return self._choose_initializer()

    def forget(self, worker: Incarnation) -> None:
        """The first half of `remove`: the worker is not counted on any more."""
        self.suspend(worker)
        if self.initializer == worker:
            self.initializer = None

    def suspend(self, worker: Incarnation) -> None:
        """The worker is gone but not fenced yet: another one must not begin what it may still be doing."""
        self._registered = [each for each in self._registered if each != worker]

    def create(self) -> list[CreatePartitions]:
        """What is to be created now, if anything. Raises NotReady while servers are being asked, or waited for."""
        if self.stage is Stage.LOST:
            raise NotReady("a server is gone, and first values with it: partitions wait for another server")
        if self.stage is Stage.CREATING:
            raise NotReady("the servers are being given their partitions", why="a map is shown once it is true")
        if self.stage is not Stage.UNCREATED:
            return []
        assert self.layout is not None
        assert self.map is not None
        self.stage = Stage.CREATING
        return [
            CreatePartitions(
                job=self._job,
                server=Server(server, owned[0].address),
                generation=self.map.generation,
                layout=self.layout,
                partitions=tuple(owner.partition for owner in owned),
                mode=self._settings.consistency.mode.updates,
                logical_ranks=self._settings.logical_rank_count,
                durability=self._settings.durability,
                staleness=self._settings.consistency.bound,
                stale=self._settings.consistency.stale,
                clipping=self._settings.server_clipping,
                backup_workers=self._settings.consistency.backup_workers,
                switches=self._switches,
                rows_at_once=self._settings.consistency.rows_at_once,
            )
            for server, owned in self.map.by_server().items()
        ]

    def end_creation(self, generation: Generation, *, created: bool) -> list[Entry]:
        """Servers were asked under the map of that generation."""
        if self.stage is not Stage.CREATING or generation != self.generation:
            return []
        self.stage = Stage.CREATED if created else Stage.UNCREATED
        return [_CREATED] if created else []

    def placed(self, worker: Incarnation) -> VariablesPlaced:
        assert self.layout is not None
        assert self.map is not None
        return VariablesPlaced(self.layout, self.map, initializer=self.initializer == worker)

    def check_commit(self, worker: Incarnation, generation: Generation) -> None:
        """The worker has given first values under the map of that generation. Raises InvalidRequest, NotReady, and
        StaleGeneration where they were lost since."""
        if self._committer == worker:
            return  # and partitions may have moved since, with them
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

    def commit(self, worker: Incarnation) -> bool:
        """The first values are on the servers, for good. True the first time."""
        if self.stage is not Stage.CREATED:
            return False
        self.stage, self.initializer, self._committer = Stage.COMMITTED, None, worker
        return True

    def open(self) -> list[OpenPartitions]:
        """What is to be opened now, if anything. Raises NotReady while servers are being asked."""
        if self.stage is Stage.OPENING:
            raise NotReady("the servers are opening their partitions")
        if self.stage is not Stage.COMMITTED:
            return []
        assert self.map is not None
        self.stage = Stage.OPENING
        return [OpenPartitions(self._job, server, self.map.generation) for server in self.servers]

    def reopen(self, now_ms: int) -> list[OpenPartitions]:
        """As `open`, after a failure and not too soon: once committed, the job needs no worker to go on."""
        return self.open() if self.stage is Stage.COMMITTED and now_ms >= self._retry_at_ms else []

    def end_opening(self, generation: Generation, *, opened: bool, now_ms: int) -> list[Entry]:
        """As `end_creation`."""
        if self.stage is not Stage.OPENING or generation != self.generation:
            return []
        self.stage = Stage.OPEN if opened else Stage.COMMITTED
        self._retry_at_ms = now_ms + OPEN_RETRY_MS
        return [_OPENED] if opened else []

    def _choose_initializer(self) -> list[Entry]:
        if self.initializer is not None or self.stage not in _BEFORE_COMMIT or not self._registered:
            return []
        self.initializer = self._registered[0]
        return [_initializer_chosen(self.initializer)]

    # ---- records

    @property
    def registered(self) -> Entry:
        """The record of the first registration, with what was decided about it."""
        assert self.layout is not None
        assert self.map is not None
        return "variables_registered", {
            "layout": layout_records.to_record(self.layout),
            "map": layout_records.map_to_record(self.map),
        }

    @property
    def moved(self) -> Entry:
        """The record of a map that was not the first."""
        assert self.map is not None
        return "partitions_moved", {"map": layout_records.map_to_record(self.map)}

    @property
    def placed_again(self) -> Entry:
        """The record of a map under which first values are given again."""
        assert self.map is not None
        return "partitions_placed_again", {"map": layout_records.map_to_record(self.map)}

    def entries(self) -> list[Entry]:
        """Records that make this deployment anew, but for `suspend`."""
        if self.layout is None:
            return []
        admitted = [_admitted(worker) for worker in self._registered]
        if self.stage is Stage.RESTORING:
            return [self.registered, RESTORED_LATER, *admitted]
        if self.stage is Stage.OPEN and self._committer is None:
            return [self.registered, RESTORED_LATER, *admitted, _OPENED]
        entries = [self.registered, *admitted]
        if self.initializer is not None:
            entries.append(_initializer_chosen(self.initializer))
        if self.stage not in _BEFORE_CREATED:
            entries.append(_CREATED)
        if self._committer is not None:
            entries.append(committed(self._committer))
        if self.stage is Stage.OPEN:
            entries.append(_OPENED)
        return entries

    def restore(self, kind: str, body: Body) -> None:
        """Takes a record of `entries`. Calls to servers that were under way are due again. Raises DamagedRecord."""
        if kind == "variables_registered":
            require(self.stage is Stage.EMPTY, "variables are registered twice")
            self.layout = layout_records.of_record(body.part("layout"))
            self.map = layout_records.map_of_record(body.part("map"), len(self.layout.partitions))
            self.stage = Stage.UNCREATED
            return
        require(self.stage is not Stage.EMPTY, "there are no variables yet")
        match kind:
            case "worker_admitted":
                self._registered = sorted({*self._registered, Incarnation(body.number("worker", least=1))})
            case "initializer_chosen":
                self.initializer = Incarnation(body.number("worker", least=1))
            case "partitions_moved":
                assert self.layout is not None
                self.map = layout_records.map_of_record(body.part("map"), len(self.layout.partitions))
            case "partitions_placed_again":
                require(self.stage is Stage.LOST, f"first values are given again, and the stage is {self.stage.value}")
                assert self.layout is not None
                self.place_again(layout_records.map_of_record(body.part("map"), len(self.layout.partitions)))
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


def committed(worker: Incarnation) -> Entry:
    """The record of the first values."""
    return "variables_committed", {"worker": worker}


def _admitted(worker: Incarnation) -> Entry:
    return "worker_admitted", {"worker": worker}


def _initializer_chosen(worker: Incarnation) -> Entry:
    return "initializer_chosen", {"worker": worker}


def check_registration(
    layout: JobLayout,
    variables: Sequence[VariableSpec],
    optimizer: OptimizerSpec,
    tables: Sequence[TableSettings] = (),
    whose: str = "the job",
) -> None:
    """Raises VariableConflict unless a registration is equal to the one that made the layout, which is `whose`."""
    try:
        _check_variables(layout.variables, variables)
        _check_optimizer(layout.optimizer, optimizer)
        check_same(layout.tables, tables)
    except VariableConflict as error:
        raise VariableConflict(f"{error.what} (as {whose} has it)", facts=error.facts) from error


def _check_variables(first: Sequence[VariableSpec], second: Sequence[VariableSpec]) -> None:
    for index, (expected, got) in enumerate(zip(first, second, strict=False)):
        if expected != got:
            raise VariableConflict(
                f"variable {index} differs from the job's: expected {_described(expected)}, got {_described(got)}",
                facts={"variable": expected.name},
            )
    if len(first) != len(second):
        longer = max(first, second, key=len)
        odd = longer[min(len(first), len(second))].name
        raise VariableConflict(
            f"expected the job's {len(first)} variables, got {len(second)}; {odd!r} is on one side only",
            facts={"variable": odd},
        )


def _check_optimizer(first: OptimizerSpec, second: OptimizerSpec) -> None:
    if first.kind != second.kind:
        raise VariableConflict(f"the job's optimizer is {first.kind!r}, this worker's is {second.kind!r}")
    if len(first.groups) != len(second.groups):
        raise VariableConflict(
            f"the job's optimizer has {len(first.groups)} parameter groups, this worker's has {len(second.groups)}"
        )
    names = optimizers.setting_names(first.kind)
    for index, (expected, got) in enumerate(zip(first.groups, second.groups, strict=True)):
        for name, left, right in zip(names, expected, got, strict=True):
            if left != right:
                raise VariableConflict(
                    f"setting {name} of parameter group {index}: expected {left!r} as the job has it, got {right!r}",
                    facts={"setting": name},
                )


def _described(spec: VariableSpec) -> str:
    return f"{spec.kind.value} {spec.name!r} {spec.dtype.value}{list(spec.shape)} in group {spec.group}"
