"""The state of one partition, and what reads or changes it as a whole: first values, leases, restores.

Two locks guard a partition:

    turn   is held while the partition is changed, for as long as the arithmetic takes: one change at a time
    lock   guards what others see: version, ledger, gate, row overlay. It is held only for the moment in which the
           thread that has the turn makes its change visible, never during arithmetic. `changed` is its condition

So pulls, look-ups and checkpoints never wait for arithmetic.

Invariants: work is counted once, by its name (ledger.md, rule A2; `push.py`); a push is applied whole or not at all, so
memory is allocated before anything changes; the generation is checked within the turn (rule A3), and whatever raises
the generation takes the turn afterwards; first values are written only before the partition is opened. If memory is
refused in the middle of a push, its tables are torn, and the partition refuses all pushes and pulls from then on. Must
not know: other partitions, sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import SEALED, CheckpointDamaged, Internal, InvalidRequest, NotReady, ShardyardError
from shardyard.domain.ids import Incarnation, PartitionId, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import HELD_ROWS_BYTES_MAX
from shardyard.domain.push_names import DoneDataShards, SourceKey, SourceMark, Watermark
from shardyard.domain.replica_groups import NO_STEP, TakenStep
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.wire.frames import Scatter
from shardyard_ps_server.partition.contribution import Contribution, PayloadLayout
from shardyard_ps_server.partition.dense_state import DenseState, StateCut
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.staleness import Staleness, Tally
from shardyard_ps_server.partition.step_gate import StepGate
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.lookups_in_flight import LookupsInFlight, TablePart
from shardyard_ps_server.rows.partition_tables import PartitionTables
from shardyard_ps_server.rows.pushed_rows import PushedTableRows
from shardyard_ps_server.rows.row_overlay import RowOverlay
from shardyard_ps_server.rows.table_states import Since, Tables, read_tables
from shardyard_ps_server.tables.cuts import TableCut
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.versions import Bytes, Memory, Versions, aligned_empty, private_memory

SYSTEM_CLOCK: Final = SystemClock()


@dataclass(eq=False)
class SyncSteps:
    """The step that a synchronous job's partition gathers. `mean`: of all contributions, while the step waits for its
    verdict. `kept`: buffers with payloads of this step; `spare`: buffers for later steps."""

    gate: StepGate[Contribution]
    mean: Contribution | None = None
    kept: list[Bytes] = field(default_factory=list)
    spare: list[Bytes] = field(default_factory=list)

    def buffer(self, nbytes: int) -> Bytes:
        """Raises TooLarge."""
        return self.spare.pop() if self.spare else aligned_empty(nbytes)

    def free_buffers(self) -> None:
        """Called when no payload of the step is needed any more."""
        self.spare += self.kept
        self.kept = []


@dataclass(frozen=True)
class Cut:
    """A partition at one moment: version, ledger, values, the number of updates of each block, and, once `complete` was
    called, optimizer state. `tables`: cuts of the same moment. Values and tables can be read until `release`."""

    partition: PartitionId
    version: Version
    marks: tuple[SourceMark, ...]
    floor: Token
    counts: npt.NDArray[np.int64]
    values: Bytes
    state: StateCut
    let_go: Callable[[], None]
    tables: Mapping[str, TableCut] = field(default_factory=dict)

    def complete(self) -> None:
        """Copies what updates have not copied, while they go on."""
        while not self.state.complete:
            self.state.keep_next()

    def release(self) -> None:
        for cut in self.tables.values():
            cut.close()
        self.let_go()


@dataclass
class PublishedDraft:
    """The state after a step, of which some has come. `arrays`: values and the optimizer's, in the places of the
    payload, in the order of `received`. `counts`: updates of each block, as far as a worker has said them."""

    taken: TakenStep
    counts: list[int]
    arrays: dict[str, Bytes]
    received: Scatter


class Partition:
    """Safe for several threads.

    Methods and functions with a parameter `check_current` call it within the turn, before anything changes. It raises
    StaleGeneration if the partition has moved to another server meanwhile.
    """

    def __init__(
        self,
        layout: JobLayout,
        partition: PartitionId,
        rules: UpdateRules,
        memory: Memory = private_memory,
        *,
        clock: Clock = SYSTEM_CLOCK,
        budget: Budget | None = None,
        in_flight: LookupsInFlight | None = None,
    ) -> None:
        """`clock`: for the age of table rows; `budget`: of all tables of the server; `in_flight`: rows of the job that
        must not expire now."""
        part = layout.partitions[partition]
        self.id = partition
        self.rules = rules
        self.payload = PayloadLayout(layout, part)
        self.dense = DenseState(layout, self.payload)
        self.rows = PartitionTables(
            layout,
            clock,
            recorded=rules.logged,
            swept=rules.rows_have_versions,
            budget=budget,
            in_flight=None
            if in_flight is None
            else lambda table, ids: in_flight.without(TablePart(partition, table), ids),
        )
        self.overlay = RowOverlay(HELD_ROWS_BYTES_MAX // len(layout.partitions), keeps_last=rules.rows_have_versions)
        self.rows_at_once = rules.rows_at_once and bool(layout.tables)
        """In a hybrid job: rows of a contribution are updated when it is recorded."""
        self.torn: Internal | None = None
        """The reason for which the partition refuses all pushes and pulls, if it does."""
        self.versions = Versions(part.payload_bytes, memory)
        self.ledger = Ledger(partition)
        self.stale: Staleness | None = None
        if rules.stale is not None:
            row_kinds = [table.optimizer for table in layout.tables]
            kind, logged = layout.optimizer.kind, rules.logged
            self.stale = Staleness(rules.stale, partition, kind, self.versions, logged=logged, row_kinds=row_kinds)
        self.steps = SyncSteps(self.gate_at(0)) if rules.mode is UpdateMode.SYNC else None
        self.published = NO_STEP
        """In a mirrored job the replicas' step whose state the variables have, and the group that has taken it."""
        self.newest_cut: int | None = None
        """The version that was cut for a checkpoint last."""
        self.draft: PublishedDraft | None = None
        """A published state of which some workers have not given their parts yet."""
        self.is_open = False
        self.named_cut: int | Cut | ShardyardError | None = None
        """The version at which a checkpoint will be cut; then that cut, or the error that prevented it."""
        self.named_since: Since = {}
        self.named_seal = False
        self.sealed = False
        """Nothing may change any more: the state is in a checkpoint from which another server continues."""
        self.turn = threading.Lock()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.awaited: dict[object, Callable[[], None]] = {}
        """Calls to make after the next change, by the pause that wants one (service.version_pause)."""

    @property
    def tables(self) -> Tables:
        return self.rows.by_name

    def describe(self) -> tuple[Version, int]:
        """The newest version and the number of sources in the ledger."""
        with self.lock:
            return self.versions.newest, len(self.ledger)

    def check_whole(self) -> None:
        if self.torn is not None:
            raise self.torn.anew()

    def check_unsealed(self) -> None:
        """Raises NotReady (facts: sealed)."""
        if self.sealed:
            raise NotReady(
                f"partition {self.id} moves to another server",
                why="its server leaves in order",
                facts={SEALED: str(self.id)},
            )

    def wait(self, until: float) -> bool:
        """Waits for a change, with `changed` held. Returns False at `until` (time.monotonic)."""
        left = until - time.monotonic()
        return left > 0 and self.changed.wait(left)

    def wake(self) -> None:
        """Carries on the pulls that have waited for a change. Called after it, without locks."""
        if self.awaited:
            with self.lock:
                calls = list(self.awaited.values())
                self.awaited.clear()
            for call in calls:
                call()

    def blank(self) -> Bytes:
        """Returns a buffer for the next version. Raises TooLarge."""
        with self.lock:
            new = self.versions.take_idle()
        return self.versions.allocate() if new is None else new

    def release(self, buffer: Bytes) -> None:
        """Ends a reader's hold of a version's buffer."""
        with self.lock:
            self.versions.release(buffer)

    # ---- first values

    def set_values(self, payload: Bytes, check_current: Callable[[], None]) -> None:
        """Overwrites the first values; the optimizer begins without state. Raises InvalidRequest if the partition is
        open."""
        with self.turn:
            check_current()
            if self.is_open:
                raise InvalidRequest(f"first values for partition {self.id}, which is open")
            self.versions.values[:] = payload
            self.dense.begin_anew()

    def set_optimizer_state(
        self, counts: Sequence[int], slots: Mapping[str, Bytes], check_current: Callable[[], None]
    ) -> None:
        """Sets the state that the optimizer begins with, after the first values. Raises InvalidRequest if the partition
        is open, or keeps other state."""
        with self.turn:
            check_current()
            if self.is_open:
                raise InvalidRequest(f"the optimizer's first state for partition {self.id}, which is open")
            self.dense.begin_with(counts, slots)

    def set_rows(self, rows: Sequence[PushedTableRows], check_current: Callable[[], None]) -> None:
        """Sets first values of rows, over those that are there. Raises InvalidRequest if the partition is open,
        TableFull."""
        with self.turn:
            check_current()
            if self.is_open:
                raise InvalidRequest(f"first rows for partition {self.id}, which is open")
            self.rows.load(rows)

    def open(self) -> None:
        """The first values are final from here on."""
        with self.turn:
            self.is_open = True

    # ---- leases and ledger

    def check_open(self, key: SourceKey, token: Token) -> None:
        """Raises what `open_source` would raise; changes nothing."""
        with self.lock:
            self.check_unsealed()
            self.ledger.check_open(key, token)

    def open_source(self, key: SourceKey, token: Token) -> Watermark:
        with self.turn, self.lock:
            self.check_unsealed()
            return Watermark(self.id, self.ledger.open(key, token), self.versions.newest)

    def watermark(self, key: SourceKey) -> Watermark:
        with self.lock:
            return Watermark(self.id, self.ledger.next(key), self.versions.newest)

    def forget(
        self,
        done: Sequence[DoneDataShards],
        workers: Sequence[Incarnation],
        floor: Token,
        check_current: Callable[[], None],
    ) -> None:
        """Rule A7. Raises StaleGeneration: a partition that was restored since may not have these shards closed."""
        with self.turn, self.lock:
            check_current()
            self.ledger.forget(done, workers, floor)

    def pass_over(self, key: SourceKey, next_sequence: int, check_current: Callable[[], None]) -> None:
        """Rule A11. Raises StaleGeneration."""
        with self.turn, self.lock:
            check_current()
            self.check_unsealed()
            self.ledger.pass_over(key, next_sequence)

    # ---- stale gradients

    def remember_base(self, worker: Incarnation, version: Version, buffer: Bytes) -> None:
        """Notes that a worker got that version, in a buffer that is held. Its next push may be computed on it."""
        if self.stale is not None:
            with self.lock:
                if version.life == self.versions.newest.life:  # otherwise the partition was restored since
                    self.stale.keep(worker, version, buffer)

    def forget_bases(self, worker: Incarnation | None = None) -> None:
        """Forgets the versions of a worker that pushes nothing from now on; None: of all workers."""
        if self.stale is not None:
            with self.lock:
                self.stale.forget(worker)

    @property
    def tally(self) -> Tally | None:
        """Counts of stale gradients, in a job with a rule for them."""
        if self.stale is None:
            return None
        with self.lock:
            return self.stale.tally

    # ---- restores

    def restore(self, state: PartitionState, tables: Tables | None = None) -> None:
        """Puts the partition back to a cut, and opens it. Readers may go on with buffers that they hold. `tables`: of
        the state, if they were read already. Raises CheckpointDamaged if state is missing, TooLarge, and what reading
        tables raises, having changed nothing."""
        if tables is None:
            tables = read_tables(state.tables, self.rows.budget)
        if tables.keys() != self.rows.names:
            raise CheckpointDamaged(
                f"partition {self.id} with the tables {sorted(tables)[:8]}; expected {sorted(self.rows.names)[:8]}"
            )
        with self.turn:
            new = self.blank()
            found = [self.dense.arrays(block.index, new) for block in state.blocks]
            for block, into in zip(state.blocks, found, strict=True):
                if {"values", *block.slots} != into.keys():
                    with self.lock:
                        self.versions.return_unused(new)
                    raise CheckpointDamaged(
                        f"block {block.index} of partition {self.id} with the state {sorted(block.slots)}; expected "
                        f"{sorted(into.keys() - {'values'})}"
                    )
            self.dense.keep_all()
            new[:] = 0
            for block, into in zip(state.blocks, found, strict=True):
                for name, values in ("values", block.values), *block.slots.items():
                    into[name][:] = values
            self.dense.restore_counts([block.count for block in state.blocks])
            with self.lock:
                self.versions.restore(state.version, new)
                self.rows.become(tables)
                self.overlay.clear("the partition has gone back to a checkpoint")
                self.overlay.end_update()
                self.torn, self.sealed = None, False
                self.published, self.newest_cut = TakenStep(state.version.number, 0), None
                self.ledger.restore(state.marks, state.floor)
                if self.stale is not None:
                    self.stale.restored(state.version)
                if self.steps is not None:
                    self.steps.gate, self.steps.mean = self.gate_at(state.version.number), None
                    self.steps.free_buffers()
                self.is_open = True
                self.changed.notify_all()
        self.wake()

    def leave(self) -> None:
        """Frees the rows, and the versions kept for workers, because the partition has left this server."""
        self.forget_bases()
        with self.turn, self.lock:
            self.rows.become({})
            self.overlay.clear("the partition has left this server")

    def gate_at(self, step: int) -> StepGate[Contribution]:
        """A gate that gathers this step first."""
        return StepGate(self.id, self.rules.logical_ranks, step=step, backup_workers=self.rules.backup_workers)


@contextmanager
def take_turns(partitions: Iterable[Partition]) -> Iterator[None]:
    """Holds the turns of several partitions, taken in the order of numbers, so that two threads cannot block each
    other."""
    with ExitStack() as turns:
        for partition in sorted(partitions, key=lambda each: each.id):
            turns.enter_context(partition.turn)
        yield
