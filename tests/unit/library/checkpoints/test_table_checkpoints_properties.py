"""Tables in checkpoints against a dictionary: whatever was pushed, expired and cut, whole or in parts, and while files
were being written, what is read back is the table of that moment, bit by bit; and it goes on from there with the bits
that it would have had."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.checkpoints.manifest import TableEntry
from shardyard.checkpoints.table_state import TableState
from shardyard.domain.errors import StorageUnavailable
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.storage.json_reader import JsonNode, canonical, document_of
from shardyard.storage.storage import Buffer, RemoteStorage, Written
from shardyard_ps_server.checkpoint import table_saver
from shardyard_ps_server.checkpoint.table_saver import TableSaver
from shardyard_ps_server.rows.table_states import cut_tables, read_tables
from shardyard_ps_server.tables import cold_file, cuts, disk_tier, expiry, stripes
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from tests.support.plain_table import PlainTable
from tests.unit.ps_server.tables.test_table_properties import IDS, RULES, SMALL_TIER, bound, contents, expected

PARTITION = PartitionId(0)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Tables of a few hundred rows have all that large ones have: stripes, chunks, files, chains that end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "ENTRIES_MAX", 40)
        patch.setattr(stripes, "PARALLEL_ENTRIES", 10)
        patch.setattr(stripes, "HOMES_FIRST", 4)
        patch.setattr(stripes, "_DOUBLED_HOMES", 16)
        for module in (cuts, expiry):
            patch.setattr(module, "HOMES_PER_STEP", 5)
        patch.setattr(cuts, "_STEP_ENTRIES", 7)
        patch.setattr(cuts, "CHUNK_ENTRIES", 11)
        patch.setattr(cold_file, "PIECE_BYTES_LEAST", 1_000)
        for name, value in SMALL_TIER.items():
            patch.setattr(disk_tier, name, value)
        patch.setattr(table_saver, "FILE_BYTES", 1_000)
        patch.setattr(table_saver, "CHAIN_SHARE", 2.0)
        patch.setattr(table_saver, "CHAIN_CUTS_MAX", 6)
        yield


class Busy(RemoteStorage):
    """While a file is written something else is done; and one of the next may be refused."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        self._do = do
        self.refuse_in = -1

    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        self._do()
        self.refuse_in -= 1
        if self.refuse_in == 0:
            raise StorageUnavailable("no room")
        return super().write(path, pieces)


class Trained:
    """A table, its dictionary, and its newest checkpoint with what the dictionary was then."""

    def __init__(self, table_settings: TableSettings, budget: Budget | None) -> None:
        part = PartitionLayout(PARTITION, 0, ())
        self.layout = JobLayout((), OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)), (part,), (table_settings,))
        self.settings, self.budget = table_settings, budget
        self.table, self.plain = Table(table_settings, budget), PlainTable(table_settings)
        self.saver = TableSaver(Incarnation(7))
        self.storage = Busy(self.push_a_little)
        self.rng = np.random.default_rng(0)
        self.step = self.now_ms = self.number = self.base = 0
        self.entry, self.then, self.step_then, self.then_ms = TableEntry(0, 0, 0), PlainTable(table_settings), 0, 0

    def do(self, what: str, seed: int, ids: list[int]) -> None:
        self.rng = np.random.default_rng(seed)
        if what in ("push", "count"):
            self.push(ids, gradients=what == "push")
        elif what == "remove":
            self.forget(self.table.remove(np.unique(np.array(ids, np.int64))))
        elif what == "expire":
            gone = self.table.expiry.expiring(self.step, int(self.rng.integers(1, 200)), now_ms=self.now_ms).ids
            self.table.remove_expired(gone)
            self.forget(gone)
        elif what == "restore":
            self.restore()
        else:
            self.cut(what)

    def push(self, ids: list[int], *, gradients: bool) -> None:
        self.step += int(self.rng.integers(1, 4))
        self.now_ms += int(self.rng.integers(0, 9)) * self.settings.expiry.age_unit
        counts = self.rng.integers(1, 4, len(ids))
        array = np.array(ids, np.int64)
        given_gradients = self.rng.standard_normal((len(ids), self.settings.dim)).astype(np.float32)
        if gradients:
            self.table.push(array, given_gradients, self.step, counts=counts, now_ms=self.now_ms)
        else:
            self.table.count(array, counts, self.step, self.now_ms)
        self.plain.push(ids, given_gradients if gradients else None, self.step, counts.tolist(), self.now_ms)

    def push_a_little(self) -> None:
        self.push(self.rng.integers(-40, 40, 9).tolist(), gradients=True)
        if self.rng.integers(0, 3) == 0:
            self.forget(self.table.remove(np.unique(self.rng.integers(-40, 40, 3))))

    def forget(self, gone: np.ndarray) -> None:
        for number in gone.tolist():
            del self.plain.entries[number]

    def cut(self, what: str) -> None:
        """`saved`: committed; `lost`: written, and never committed; `refused`: given up half written; `unread`: before
        anything of it was read."""
        self.number += 1
        name = self.settings.name
        since = self.saver.since(PARTITION, name, self.table, self.base)
        then, step, now_ms = copy.deepcopy(self.plain), self.step, self.now_ms
        found = cut_tables({name: self.table}, {} if since is None else {name: since})[name]
        assert found.only_changed == (since is not None)
        self.push_a_little()
        if what == "unread":
            found.close()
            return
        self.storage.refuse_in = int(self.rng.integers(1, 5)) if what == "refused" else -1
        try:
            entry = self.saver.save(self.layout, PARTITION, 0, found, self.number, self.storage)
        except StorageUnavailable:
            assert what == "refused"
            return
        finally:
            found.close()
        if what == "saved":
            self.base, self.entry, self.then, self.step_then, self.then_ms = self.number, entry, then, step, now_ms

    def restore(self) -> None:
        """Goes back to the newest checkpoint."""
        self.table = self.read()
        self.check(self.table, self.then)
        self.plain, self.step, self.now_ms = copy.deepcopy(self.then), self.step_then, self.then_ms

    def read(self) -> Table:
        if not self.base:
            return Table(self.settings, self.budget)
        state = TableState(self.storage, "", self.layout, PARTITION, 0, self.entry)
        rows = {
            number: row.tobytes()
            for ids, values in state.rows()
            for number, row in zip(ids.tolist(), values, strict=True)
        }
        dim = self.settings.dim
        assert rows == {
            number: entry.row[:dim].tobytes() for number, entry in self.then.entries.items() if entry.row is not None
        }
        found = read_tables((state,), self.budget)[self.settings.name]
        assert found.state.updates == self.step_then
        assert found.state.now_ms == (self.then_ms if self.settings.expiry.by_time else 0)
        return found

    def check(self, table: Table, plain: PlainTable) -> None:
        assert contents(list(table.cuts.items())) == expected(plain)
        if self.settings.admission.kind is Admission.ESTIMATE:
            with table.cuts.take() as cut:
                assert cut.cells is not None
                assert bytes(cut.cells) == (bytes(plain.cells) or bytes(cut.cells.size))

    def finish(self) -> None:
        self.check(self.table, self.plain)
        restored = self.read()
        self.check(restored, self.then)
        plain, step, now_ms = copy.deepcopy(self.then), self.step_then, self.then_ms
        for _ in range(3):
            step, now_ms = step + 2, now_ms + 2 * self.settings.expiry.age_unit
            ids = self.rng.integers(-60, 60, 30)
            gradients = self.rng.standard_normal((30, self.settings.dim)).astype(np.float32)
            restored.push(ids, gradients, step, now_ms=now_ms)
            plain.push(ids.tolist(), gradients, step, [1] * 30, now_ms)
        self.check(restored, plain)


@st.composite
def table_settings(draw: st.DrawFn) -> TableSettings:
    kind, given_settings = draw(st.sampled_from(RULES))
    zeros = st.booleans()
    admission = draw(
        st.one_of(
            st.builds(AdmissionSettings, zeros=zeros),
            st.builds(AdmissionSettings, st.just(Admission.COUNT), st.integers(1, 5), zeros=zeros),
            st.builds(AdmissionSettings, st.just(Admission.CHANCE), chance=st.floats(0.1, 1.0), zeros=zeros),
            st.builds(
                AdmissionSettings,
                st.just(Admission.ESTIMATE),
                st.integers(1, 5),
                cells=st.sampled_from([64, 256, 2048]),
                zeros=zeros,
            ),
        )
    )
    others = {
        "frequency_min": st.integers(0, 3),
        "norm_min": st.sampled_from([0.0, 0.5]),
        "rows_kept": st.integers(0, 60),
    }
    gone = st.one_of(
        st.builds(ExpirySettings, age_steps=st.integers(0, 30), grace_steps=st.integers(0, 10), **others),
        st.builds(ExpirySettings, age_ms=st.integers(0, 90), grace_ms=st.integers(1, 30), **others),
        st.builds(ExpirySettings, age_ms=st.just(1 << 20), **others),
    )
    return TableSettings(
        draw(st.text(min_size=1, max_size=9)),
        draw(st.sampled_from([1, 3, 8])),
        kind,
        make_group(kind, given_settings),
        draw(st.integers(0, 2**64 - 1)),
        InitialValues(draw(st.sampled_from(InitialKind)), 0.5),
        rows_max=1 << 14,
        admission=admission,
        expiry=draw(gone),
    )


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["push"] * 6
            + ["count", "remove", "expire", "expire"]
            + ["saved"] * 4
            + ["lost", "refused", "unread", "restore"]
        ),
        st.integers(0, 2**32),
        st.lists(IDS, max_size=60),
    ),
    max_size=25,
)


@pytest.mark.long("True")
@pytest.mark.parametrize("bounded", [False, True])
@settings(max_examples=100, deadline=None)
@given(given_settings=table_settings(), operations=OPERATIONS)
def test_what_is_read_back_is_the_table_that_was_cut(
    bounded: bool, given_settings: TableSettings, operations: list[tuple[str, int, list[int]]]
) -> None:
    trained = Trained(given_settings, bound() if bounded else None)
    for what, seed, ids in operations:
        trained.do(what, seed, ids)
    trained.finish()


@settings(max_examples=200, deadline=None)
@given(table_settings())
def test_settings_come_back_as_they_were(given_settings: TableSettings) -> None:
    text = canonical(document_of(given_settings))
    found = JsonNode.parse(text, "it", at=0).to(TableSettings, signed=("seed",))
    assert found == given_settings
    assert canonical(document_of(found)) == text
