"""One table's rows in one partition.

Owns: what a table is asked, checked before anything changes. Invariants: a look-up changes nothing (rule A13); what is
refused has changed nothing; the same pushes in the same order give the same rows, whatever the index's private seed,
the number of threads and of stripes; a cut shows one moment between pushes. Calls may come from any threads: pushes,
removals and look-ups go on side by side, each stripe's lock for a part of a batch; whoever needs the order of two
pushes of one id sends them one after the other (the partition does). Must not know: jobs, the wire, files.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import NotReady, TableError
from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables import row_optimizers, row_rules
from shardyard.domain.tables.row_admission import draws_key, share_of
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard.domain.tables.row_values import row_key
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables.batches import Batches, batch_in
from shardyard_ps_server.tables.bloom_filter import BloomFilter
from shardyard_ps_server.tables.checks import check_array, check_ids
from shardyard_ps_server.tables.cut_chain import ChainState, CutChain
from shardyard_ps_server.tables.cuts import Chunk, CutEnd, CutMoment, TableCut
from shardyard_ps_server.tables.disk_tier import DiskTier
from shardyard_ps_server.tables.expiry import HOMES_PER_STEP, Expired, Expiry, Sweep
from shardyard_ps_server.tables.loops import push_loops
from shardyard_ps_server.tables.memory import heap
from shardyard_ps_server.tables.memory.address_space import Pages
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.memory.epoch_reclaim import EpochReclaim
from shardyard_ps_server.tables.memory.layout import (
    ADMITTED,
    COLD_ROWS,
    LOGGED,
    MARK,
    NEXT_ROW,
    SIDE,
    Floats,
    Numbers,
)
from shardyard_ps_server.tables.memory.shared_exclusive import SharedExclusiveLock
from shardyard_ps_server.tables.new_memory import fresh_state, new_memory, with_log, without_log
from shardyard_ps_server.tables.row_quota import RowQuota
from shardyard_ps_server.tables.stripes import Stripes

STEP_MAX: Final = (1 << 47) - 1
COLD_ROWS_MAX: Final = (1 << 29) - (1 << 14)
"""Rows of a table of which some may lie in a file."""
_NONE: Final[Numbers] = np.empty(0, np.int64)


class Table:
    """`budget`: what all tables of a server may take together, and where colder rows go. Raises TableError where the
    address space for `rows_max` rows is refused."""

    def __init__(self, settings: TableSettings, budget: Budget | None = None) -> None:
        self.settings = settings
        self.slots = row_optimizers.slots_of(settings.optimizer, settings.group)
        self._state = sum(slot.width(settings.dim) for slot in self.slots)
        rows_max = settings.rows_max if budget is None else min(settings.rows_max, COLD_ROWS_MAX)
        self._quota = RowQuota(settings.name, rows_max)
        self._memory = new_memory(settings, self.slots, rows_max, self._key, tiered=budget is not None)
        self._pages = Pages(self._memory.slab)
        self._retirement = EpochReclaim()
        self._stripes = Stripes(self._memory, self._retirement, compact=budget is not None)
        self._batches = Batches()
        self._turns = itertools.count(0, 7)
        self._gate = SharedExclusiveLock()
        self._tier: DiskTier | None = None
        if budget is not None:
            called = f"table {settings.name!r}"
            self._tier = DiskTier(self._memory, self._stripes, self._retirement, self._gate, budget, called)
        self._time_lock = threading.Lock()
        """Guards the two below. Never held around a loop."""
        self._updates = 0
        self._now_ms = 0
        self._expired = 0
        self._group = settings.group
        self._chain = CutChain()
        self._cut: TableCut | None = None
        self._expiry = Expiry(settings.expiry, settings.dim)
        self._expiring = threading.Lock()
        admission = settings.admission
        self._entered = push_loops.AdmissionRule(
            admission.kind.value, admission.threshold, share_of(admission.chance), np.uint64(0)
        )
        self._estimates = BloomFilter(admission.cells, self._key) if admission.kind is Admission.ESTIMATE else None

    # ---- reading

    @property
    def rows_max(self) -> int:
        """The most rows that it keeps, by its settings and because row numbers end."""
        return self._quota.rows_max

    @property
    def rows(self) -> int:
        return int(heap.rows_of(self._memory))

    @property
    def entries(self) -> int:
        """Ids with a row, and ids that are counted until they have one."""
        return self._stripes.entries

    @property
    def stripes(self) -> int:
        return self._stripes.count

    @property
    def homes(self) -> int:
        """Buckets of the index in which entries are at home."""
        return self._stripes.homes

    @property
    def admitted(self) -> int:
        """Rows that pushes have made."""
        return int(self._memory.shared[ADMITTED])

    @property
    def expired(self) -> int:
        """Ids that have expired."""
        return self._expired

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: rows that were ever taken, with their state, and the index."""
        rows = int(self._memory.shared[NEXT_ROW]) * int(self._memory.slab.shape[1]) * 4
        return rows + self._stripes.nbytes + (0 if self._estimates is None else self._estimates.nbytes)

    @property
    def cold_rows(self) -> int:
        """Of `rows`, those that lie in the file."""
        return int(self._memory.shared[COLD_ROWS])

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk that the file for colder rows takes."""
        return 0 if self._tier is None else self._tier.disk_bytes

    @property
    def disk_refused(self) -> str:
        """The disk's error, if rows stay in memory because of it; otherwise empty."""
        return "" if self._tier is None else self._tier.refused

    @property
    def updates(self) -> int:
        """The number of the last update."""
        return self._updates

    @property
    def now_ms(self) -> int:
        """The latest time that it was told, by its own clock, which begins with 0; 0 where ages are told in steps."""
        return self._now_ms

    @property
    def generation(self) -> int:
        """The generation of the last cut for a checkpoint."""
        return self._chain.generation

    @property
    def known_since(self) -> int | None:
        """The generation after which it is known what has changed, if there is one."""
        return self._chain.known_since

    def look_up(self, ids: Ids, out: Floats) -> None:
        """out[i] becomes the values of the row of ids[i], an id without a row its initial values (or zeros, as the
        admission settings say). `ids`: int64 (n,), repeated or not; `out`: float32 (n, dim). Changes nothing."""
        check_ids(self.settings.name, ids)
        check_array(self.settings.name, "out", out, (ids.size, self.settings.dim), np.float32)
        if not (out.flags.writeable and out.flags.c_contiguous and out.flags.aligned):
            raise TableError("look-up into an array that is read-only, or does not lie in one piece")
        with self._retirement.reading():
            push_loops.look_up(self._memory, writable(ids), self.settings.dim, out, self.settings.admission.zeros)

    # ---- changing

    def push(
        self,
        ids: Ids,
        gradients: Floats,
        step: int,
        *,
        group: Sequence[float] | None = None,
        counts: Numbers | None = None,
        finite: bool = False,
        now_ms: int = 0,
    ) -> None:
        """Makes the rows of new ids, counts all, and updates their rows. `ids`: int64 (n,); those that are repeated are
        updated one after the other. `gradients`: float32 (n, dim). `step`: the number of this update, 1 is the first.
        `group`: the optimizer's settings for it. `counts`: how often each id occurred, int64 (n,), once if it is not
        said. `finite`: gradients that are not are refused. `now_ms`: by the table's clock, which never goes back, where
        ages are told in time. Raises TableError, ShapeMismatch, DTypeMismatch, InvalidRequest; nothing has changed
        then."""
        check_ids(self.settings.name, ids)
        check_array(self.settings.name, "gradients", gradients, (ids.size, self.settings.dim), np.float32)
        if finite and not np.isfinite(gradients).all():
            raise TableError(f"gradients for {ids.size} rows of table {self.settings.name!r} that are not all finite")
        self._push(ids, gradients, step, self._checked(group), counts, now_ms)

    def count(self, ids: Ids, counts: Numbers | None, step: int, now_ms: int = 0) -> None:
        """A push without gradients: makes the rows of ids that are admitted by it, and counts all."""
        check_ids(self.settings.name, ids)
        self._push(ids, None, step, self._group, counts, now_ms)

    def check_room(self, ids: Ids) -> None:
        """Raises TableFull where the rows of those that have none would be too many; for a caller beside whom nobody
        makes rows until it has pushed or loaded these."""
        check_ids(self.settings.name, ids)
        if self.rows + ids.size > self._quota.rows_max:
            with self._gate.together(), self._room_for(ids):
                pass

    def remove(self, ids: Ids) -> Ids:
        """Takes them out, rows and counts; those that were there."""
        check_ids(self.settings.name, ids)
        gone = np.zeros(ids.size, np.bool_)
        if self._tier is not None:
            self._tier.bring(ids)
        with self._gate.together():
            memory = self._memory
            push_loops.remove(memory, self._batches.arrange(memory, ids, self._stripes.count), gone, self._turn())
            taken = ids[gone]
            self._chain.note_removed(taken)
        return taken

    def load(
        self,
        ids: Ids,
        values: Floats,
        state: Floats | None = None,
        frequencies: Numbers | None = None,
        steps: Numbers | None = None,
    ) -> None:
        """Puts rows in as they are given, over what is there: int64 (n,), float32 (n, dim), float32 (n, state), int64
        (n,) from 1 to 65,535, and int64 (n,). Without `state` it begins as that of new rows, without `frequencies` they
        are 1, without `steps` 0. Where ages are told in time so are `steps`, and without them it is now. `values` and
        `state` of the first m ids alone: the others are counted and have no row."""
        check_ids(self.settings.name, ids)
        n, settings = ids.size, self.settings
        m = values.shape[0] if values.ndim == 2 and values.shape[0] <= n else n
        check_array(self.settings.name, "values", values, (m, settings.dim), np.float32)
        if state is None:
            state = fresh_state(settings, self._memory, values)
        check_array(self.settings.name, "state", state, (m, self._state), np.float32)
        frequencies = np.ones(n, np.int64) if frequencies is None else frequencies
        if steps is None:
            steps = np.full(n, settings.expiry.time(0, self._now_ms))
        check_array(self.settings.name, "frequencies", frequencies, (n,), np.int64)
        check_array(self.settings.name, "steps", steps, (n,), np.int64)
        if n and not (frequencies.min() >= 1 and frequencies.max() <= FREQUENCY_MAX):
            raise TableError(f"frequencies from {frequencies.min()} to {frequencies.max()}; expected 1 to 65,535")
        if n and not (steps.min() >= 0 and steps.max() <= STEP_MAX):
            raise TableError(f"steps from {steps.min()} to {steps.max()}; expected 0 to 2**47 - 1")
        records = np.hstack([values, state])
        units = steps // settings.expiry.age_unit
        if self._tier is not None:
            self._tier.make_room(ids)
        with self._gate.together():
            memory = self._memory
            with self._room_for(ids):
                batch = self._batches.arrange(memory, ids, self._stripes.count)
                newest = int(steps.max()) if n else 0
                self._advance(*((0, newest) if settings.expiry.by_time else (newest, 0)))
                self._repeat(
                    lambda: int(push_loops.restore(memory, batch, records, writable(frequencies), units, self._turn()))
                )

    def load_cells(self, cells: npt.NDArray[np.uint8], begin: int | None = None) -> None:
        """Puts a cut's filter in, or a piece of it, whose first cell is number `begin`."""
        if self._estimates is None:
            raise TableError("a filter for a table whose ids are not admitted by estimate")
        self._estimates.load(cells, begin)

    def resume(self, updates: int, now_ms: int = 0) -> None:
        """After rows were loaded: that was the number of the last update, and the time by the table's clock."""
        if not self._updates <= updates <= STEP_MAX:
            raise TableError(f"update number {updates} as the last, of a table that has seen {self._updates}")
        if self.settings.expiry.by_time and not self._now_ms <= now_ms <= STEP_MAX:
            raise TableError(f"{now_ms} ms as the time, of a table that was told {self._now_ms} ms")
        self._advance(updates, now_ms)

    # ---- expiring

    def expiring(self, step: int, budget: int, besides: Sequence[Ids] = (), now_ms: int = 0) -> Expired:
        """What expires by the settings at `step`, or at `now_ms` of the table's clock, in about `budget` buckets from
        where the last call has stopped, or to the end of the table, but for `besides`: told, for who takes it out with
        `remove_expired` before it asks again. Others push and look up meanwhile."""
        gone: list[Numbers] = []
        over, staying = False, _distinct(besides)
        self._advance(0, now_ms)
        unit = self.settings.expiry.time(step, self._now_ms) // self._age_unit
        with self._expiring:
            for _ in range(max(1, budget // HOMES_PER_STEP)):
                self._expiry.bring(self._memory)
                with self._gate.together():
                    done = self._expiry.step(self._memory, unit, self.rows, staying)
                gone.append(done.ids)
                over = done.over
                if over:
                    break
        # where a stripe has grown since the last step, some are at home in both
        return Expired(np.unique(np.concatenate(gone)), over)

    def sweep(self, step: int, besides: Sequence[Ids]) -> Ids:
        """All that expires at `step`, ascending, but for `besides`, from the entries alone: two tables with the same
        entries tell the same. Told, for who takes it out with `remove_expired`, and beside whom nobody pushes."""
        expiry = self.settings.expiry
        sweep = Sweep(expiry, self.settings.dim, self._memory, self._gate.together)
        return sweep.expiring(expiry.time(step, self._now_ms) // self._age_unit, self.entries, _distinct(besides), step)

    def having_row(self, ids: Ids) -> Ids:
        """Returns those of the ids that have a row. Nothing may be pushed meanwhile."""
        check_ids(self.settings.name, ids)
        with self._gate.together():
            return ids[~self._without_row(ids)]

    def remove_expired(self, ids: Ids) -> None:
        """What `expiring` or `sweep` has told, here or where a log was written."""
        self._expired += self.remove(ids).size

    # ---- cutting

    def items(self) -> Iterator[Chunk]:
        """All entries as they are now, in chunks, while pushes go on. Raises NotReady while another cut is taken."""
        with self._cut_now(in_chain=False, only_changed=False) as cut:
            yield from cut

    def cut(self, since: int | None = None) -> TableCut:
        """The table as it is now, for a checkpoint; remember its `generation`. `since`: only what has changed
        after the cut of that generation, which must be the last one, and have been read to its end. Raises NotReady
        while another cut is taken, TableError for another generation."""
        self._chain.check_since(since)
        return self._cut_now(in_chain=True, only_changed=since is not None)

    def _cut_now(self, *, in_chain: bool, only_changed: bool) -> TableCut:
        with self._gate.alone():
            if self._cut is not None:
                raise NotReady("a cut of this table is being taken")
            # what may be refused comes before anything has changed
            cells = None if self._estimates is None or not in_chain else self._estimates.cut()
            shared, entries = self._memory.shared, self.entries
            self._memory = with_log(self._memory, entries)
            shared[SIDE] ^= int(MARK)
            shared[LOGGED] = 0
            before = self._chain.begin() if in_chain else None
            moment = CutMoment(
                0 if before is None else self._chain.generation,
                only_changed,
                before.removed if only_changed and before is not None else (),
                cells,
                self._updates,
                self._now_ms,
                self.settings.expiry.time(self._updates, self._now_ms) // self._age_unit,
                self.rows,
                entries,
                self._age_unit,
                self.settings.dim,
            )

            def release_cells() -> None:
                if cells is not None and self._estimates is not None:
                    self._estimates.end(cells)

            self._cut = TableCut(self._memory, moment, lambda ending: self._end_cut(ending, before), release_cells)
            return self._cut

    def _end_cut(self, ending: CutEnd, before: ChainState | None) -> None:
        with self._gate.alone():
            self._cut = None
            self._memory = without_log(self._memory)
            if before is not None:
                self._chain.end(ending, before)

    # ---- inside

    @property
    def _key(self) -> int:
        return row_key(self.settings.seed, self.settings.name)

    @property
    def _age_unit(self) -> int:
        return self.settings.expiry.age_unit

    def _turn(self) -> int:
        """Where a loop begins: threads that come at the same time begin at different stripes."""
        return next(self._turns) % self._stripes.count

    def _push(
        self,
        ids: Ids,
        gradients: Floats | None,
        step: int,
        group: tuple[float, ...],
        counts: Numbers | None,
        now_ms: int,
    ) -> None:
        if not 1 <= step <= STEP_MAX:
            raise TableError(f"update number {step}; expected 1 to 2**47 - 1")
        if not 0 <= now_ms <= STEP_MAX:
            raise TableError(f"an update at {now_ms} ms; expected 0 to 2**47 - 1")
        if counts is not None:
            check_array(self.settings.name, "counts", counts, (ids.size,), np.int64)
            if ids.size and counts.min() < 1:
                raise TableError(f"an id that occurred {counts.min()} times; expected at least once")
            counts = np.minimum(counts, FREQUENCY_MAX)
        if gradients is not None:
            gradients = np.ascontiguousarray(gradients)
        settings = self.settings
        rule = row_rules.rule_of(settings.optimizer, group, step)
        self._retirement.let_go()
        if self._tier is not None:
            self._tier.make_room(ids)
        else:  # a page that comes while a stripe is locked is waited for by all who look something up in that
            self._pages.make_ready(int(self._memory.shared[NEXT_ROW]) + ids.size)
        with self._gate.together(), self._room_for(ids):
            self._advance(step, now_ms)
            pushed = push_loops.Pushed(
                rule.code,
                gradients is not None,
                rule.scalars,
                0 if gradients is None else gradients.ctypes.data,
                0 if counts is None else counts.ctypes.data,
                settings.expiry.time(step, self._now_ms) // self._age_unit,
                _NONE if self._estimates is None else self._estimates.count(ids, counts),
            )
            self._push_all(writable(ids), pushed, self._entrance(step))

    def _push_all(self, ids: Ids, pushed: push_loops.Pushed, entrance: push_loops.AdmissionRule) -> None:
        memory, stripes, dim = self._memory, self._stripes.count, self.settings.dim
        room = self._batches.room(ids.size)
        if push_loops.push_all(memory, room, ids, stripes, dim, pushed, entrance, self._turn()) >= 0:
            batch = batch_in(room, ids.size, stripes)
            self._repeat(lambda: int(push_loops.push(memory, batch, dim, pushed, entrance, self._turn())))

    def _repeat(self, once: Callable[[], int]) -> None:
        """A loop stops at a stripe that is full, and goes on when it has grown."""
        while (stripe := once()) >= 0:
            self._stripes.make_room(stripe)

    def _entrance(self, step: int) -> push_loops.AdmissionRule:
        if self.settings.admission.kind is not Admission.CHANCE:
            return self._entered
        return self._entered._replace(key=draws_key(self._key, step))

    def _advance(self, step: int, now_ms: int) -> None:
        with self._time_lock:
            self._updates = max(self._updates, step)
            if self.settings.expiry.by_time:
                self._now_ms = max(self._now_ms, now_ms)

    def _room_for(self, ids: Ids) -> AbstractContextManager[None]:
        """Inside, no other push takes the rows that these ids may need. Raises TableFull."""
        return self._quota.room_for(ids.size, lambda: self.rows, lambda: self._missing(ids))

    def _missing(self, ids: Ids) -> int:
        """How many of the ids have no row."""
        return np.unique(ids[self._without_row(ids)]).size

    def _without_row(self, ids: Ids) -> npt.NDArray[np.bool_]:
        missing = np.zeros(ids.size, np.bool_)
        push_loops.find_missing(self._memory, self._batches.arrange(self._memory, ids, self._stripes.count), missing)
        return missing

    def _checked(self, group: Sequence[float] | None) -> tuple[float, ...]:
        given = self.settings.group if group is None else tuple(group)
        if given != self._group:
            row_optimizers.check_update(self.settings.optimizer, self.settings.group, given)
            self._group = given
        return given


def _distinct(ids: Sequence[Ids]) -> Ids:
    """Ascending."""
    return np.unique(np.concatenate(ids)) if ids else _NONE


def warm() -> None:
    """Compiles every loop, or loads it from disk; a server does so before it takes partitions of a job with tables
    (shardyard_ps_server.jit.table_warmup)."""
    budget = Budget(1, lambda: os.memfd_create("rows"))  # so rows go to a file, and come back
    expiry = ExpirySettings(rows_kept=1_000)
    for admission in (AdmissionSettings(), AdmissionSettings(Admission.ESTIMATE, cells=64)):
        table = Table(TableSettings("warm", 1, "ftrl", rows_max=4_096, admission=admission, expiry=expiry), budget)
        ids = np.arange(2_000, dtype=np.int64)
        for part in (ids[:1_500], ids[500:], ids):
            table.push(part, np.zeros((part.size, 1), np.float32), 1, counts=np.ones(part.size, np.int64))
        table.look_up(ids, np.zeros((ids.size, 1), np.float32))
        for chunk in table.items():
            table.load(chunk.ids, chunk.values, chunk.state, chunk.frequencies, chunk.steps)
        table.having_row(table.sweep(1, [ids[:9]]))
        for homes in (1, 1 << 20):
            table.remove_expired(table.expiring(1, homes).ids)
        table.remove(ids)
