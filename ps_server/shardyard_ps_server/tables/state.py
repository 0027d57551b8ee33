"""The state of one table: what its reads, its pushes, its cuts and its expiry share."""

from __future__ import annotations

import threading

from shardyard.domain.tables.row_optimizers import slots_of
from shardyard.domain.tables.row_values import row_key
from shardyard.domain.tables.table_settings import Admission, TableSettings
from shardyard_ps_server.tables.bloom_filter import BloomFilter
from shardyard_ps_server.tables.memory import heap
from shardyard_ps_server.tables.memory.epoch_reclaim import EpochReclaim
from shardyard_ps_server.tables.memory.layout import COLD_ROWS, NEXT_ROW, RowFormat, TableMemory, record_of
from shardyard_ps_server.tables.memory.shared_exclusive import SharedExclusiveLock
from shardyard_ps_server.tables.new_memory import new_memory
from shardyard_ps_server.tables.stripes import Stripes


class TableState:
    """`tiered`: colder rows may lie in a file. Raises TableError if the address space for `rows_max` rows is
    refused."""

    def __init__(self, settings: TableSettings, rows_max: int, *, tiered: bool) -> None:
        self.settings = settings
        self.key = row_key(settings.seed, settings.name)
        self.slots = slots_of(settings.optimizer, settings.group)
        self.use(new_memory(settings, self.slots, rows_max, self.key, tiered=tiered))
        memory = self.memory
        self.format = RowFormat(
            self.stride, memory.fresh, memory.initial_kind, memory.initial_scale, memory.initial_key
        )
        self.reclaim = EpochReclaim()
        self.stripes = Stripes(self.memory, self.reclaim, compact=tiered)
        self.lock = SharedExclusiveLock()
        """Whatever changes entries holds it shared; a cut begins and ends while it is held alone."""
        by_estimate = settings.admission.kind is Admission.ESTIMATE
        self.filter = BloomFilter(settings.admission.cells, self.key) if by_estimate else None
        self.updates = 0
        """The number of the last update."""
        self.now_ms = 0
        """The latest time of the table's clock, which begins with 0; 0 if the table counts ages in steps."""
        self._clock_lock = threading.Lock()

    def use(self, memory: TableMemory) -> None:
        """While a cut is read, that is the same memory with room for the cut's log."""
        self.memory, self.record = memory, record_of(memory)

    @property
    def rows(self) -> int:
        return int(heap.rows_of(self.memory.shared))

    @property
    def rows_at_most(self) -> int:
        """`rows`, and rows that are free. Needs no lock: the rows in the file are read first, so a row that moves into
        memory meanwhile counts twice, and none is missed."""
        shared = self.memory.shared
        in_file = int(shared[COLD_ROWS])
        return in_file + int(shared[NEXT_ROW])

    @property
    def entries(self) -> int:
        """Ids with a row, and ids that are counted until they have one."""
        return self.stripes.entries

    @property
    def stride(self) -> int:
        """The numbers in a row's record: its values and its optimizer state."""
        return int(self.memory.slab.shape[1])

    def advance(self, step: int, now_ms: int) -> None:
        """Neither the number of the last update nor the clock goes back."""
        with self._clock_lock:
            self.updates = max(self.updates, step)
            if self.settings.expiry.by_time:
                self.now_ms = max(self.now_ms, now_ms)

    def unit(self, step: int) -> int:
        """The present, at update number `step`, in units of ages."""
        return self.settings.expiry.time(step, self.now_ms) // self.settings.expiry.age_unit
