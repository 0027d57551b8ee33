"""Rows of a process without a job against a server's, of the same table: whatever is pushed, put and expired at the
same steps, the same ids have the same rows, bit by bit, and are counted as often."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.row_values import row_key
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables.table import Table
from shardyard_worker.embedding.local_rows import LifetimeRules, LocalRows

DIM = 3
ALL_OF_IT = 1 << 40
IDS = st.lists(st.one_of(st.integers(-40, 40), st.sampled_from([2**63 - 1, -(2**63)])), max_size=60, unique=True)
ADMISSIONS = st.one_of(
    st.builds(AdmissionSettings, zeros=st.booleans()),
    st.builds(AdmissionSettings, st.just(Admission.COUNT), st.integers(1, 4), zeros=st.booleans()),
    st.builds(AdmissionSettings, st.just(Admission.CHANCE), chance=st.floats(0.1, 1.0)),
    st.builds(AdmissionSettings, st.just(Admission.ESTIMATE), st.integers(1, 4), cells=st.sampled_from([64, 1024])),
)
EXPIRIES = st.one_of(
    st.builds(
        ExpirySettings,
        age_steps=st.sampled_from([0, 5, 40, 100_000]),
        frequency_min=st.integers(0, 3),
        norm_min=st.sampled_from([0.0, 0.5, 2.0]),
        grace_steps=st.sampled_from([0, 3, 100_000]),
    ),
    st.builds(
        ExpirySettings,
        age_ms=st.sampled_from([0, 5, 400, 10**7]),
        norm_min=st.sampled_from([0.0, 2.0]),
        grace_ms=st.sampled_from([1, 300, 10**6]),
    ),
    st.builds(ExpirySettings, rows_kept=st.integers(1, 40)),
)
Optimizer = tuple[str, tuple[float, ...]]
OPTIMIZERS: list[Optimizer] = [
    (kind, make_group(kind, given))
    for kind, given in (
        ("sgd", {"lr": 0.3, "weight_decay": 0.01}),
        ("sgd", {"lr": 0.3, "momentum": 0.9, "nesterov": 1.0}),
        ("adagrad", {"lr": 0.3, "initial_accumulator_value": 0.2, "lr_decay": 0.1}),
        ("rowwise_adagrad", {"lr": 0.3, "weight_decay": 0.01}),
        ("adam", {"lr": 0.1, "weight_decay": 0.01}),
        ("adamw", {"lr": 0.1}),
        ("sparse_adam", {"lr": 0.1}),
        ("ftrl", {"lr": 0.3, "l1": 0.01, "l2": 0.1}),
    )
]
Contents = dict[int, tuple[bytes | None, int, int]]


class Pair:
    def __init__(
        self, admission: AdmissionSettings, expiry: ExpirySettings, kind: InitialKind, optimizer: Optimizer
    ) -> None:
        initial = InitialValues(kind, 0.5)
        self.expiry, self.optimizer = expiry, optimizer
        self.theirs = Table(TableSettings("t", DIM, *optimizer, 3, initial, 1 << 12, admission, expiry))
        self.own = LocalRows(DIM, initial, row_key(3, "t"), LifetimeRules(admission, expiry))
        self.step = self.now_ms = 0

    def do(self, what: str, seed: int, given_ids: list[int]) -> None:
        rng = np.random.default_rng(seed)
        ids = np.array(sorted(given_ids), np.int64)
        if what == "push":
            self.step += int(rng.integers(1, 20 * self.expiry.age_unit))
            gradients = rng.standard_normal((ids.size, DIM)).astype(np.float32)
            self.now_ms += int(rng.integers(0, 20 * self.expiry.age_unit))
            self.theirs.push(ids, gradients, self.step, now_ms=self.now_ms)
            self.own.update(
                ids, gradients, self.theirs.settings.optimizer, self.theirs.settings.group, self.step, self.now_ms
            )
        elif what == "put":
            known = contents(self.theirs)
            ids = np.array([number for number in ids.tolist() if number not in known], np.int64)
            rows = rng.integers(-3, 4, (ids.size, DIM)).astype(np.float32)
            self.theirs.load(ids, rows, steps=np.full(ids.size, self.expiry.time(self.step, self.now_ms)))
            self.own.put(ids, rows)
        elif what == "look_up":
            out = np.empty((ids.size, DIM), np.float32)
            self.theirs.look_up(ids, out)
            assert self.own.look_up(ids).tobytes() == out.tobytes()
        else:
            self.expire()

    def expire(self) -> None:
        counted = {number: frequency for number, (_, frequency, _) in contents(self.theirs).items()}
        gone = []
        over = False
        while not over:
            done = self.theirs.expiry.expiring(self.step, ALL_OF_IT, now_ms=self.now_ms)
            self.theirs.remove_expired(done.ids)
            gone += done.ids.tolist()
            over = done.over
        mine = self.own.expired().tolist()
        if self.expiry.rows_kept:
            # of those that are equally frequent any may stay
            assert sorted(counted[number] for number in mine) == sorted(counted[number] for number in gone)
        else:
            assert sorted(mine) == sorted(gone)
        self.own.drop(np.array(gone, np.int64))

    def check(self) -> None:
        entries = self.own.entries()
        every = self.own.everything()
        rows = dict(zip(every.ids.tolist(), every.rows, strict=True))
        if entries is None:
            assert {number: row for number, (row, _, _) in contents(self.theirs).items()} == {
                number: row.tobytes() for number, row in rows.items()
            }
            return
        columns = (entries.ids.tolist(), entries.frequencies.tolist(), entries.times.tolist())
        assert contents(self.theirs) == {
            number: (rows[number].tobytes() if number in rows else None, frequency, time)
            for number, frequency, time in zip(*columns, strict=True)
        }
        assert len(rows) == len(self.own) == self.theirs.rows
        with self.theirs.cuts.take() as cut:
            assert entries.cells.tobytes() == (b"" if cut.cells is None else cut.cells.tobytes())


def contents(table: Table) -> Contents:
    found: Contents = {}
    for chunk in table.cuts.items():
        for i, number in enumerate(chunk.ids.tolist()):
            row = chunk.values[i].tobytes() if i < len(chunk.values) else None
            found[number] = (row, int(chunk.frequencies[i]), int(chunk.steps[i]))
    return found


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push"] * 6 + ["put", "look_up", "expire", "expire"]), st.integers(0, 2**32), IDS),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(ADMISSIONS, EXPIRIES, st.sampled_from(InitialKind), st.sampled_from(OPTIMIZERS), OPERATIONS)
def test_rows_of_a_process_are_those_of_a_server(
    admission: AdmissionSettings,
    expiry: ExpirySettings,
    kind: InitialKind,
    optimizer: Optimizer,
    operations: list[tuple[str, int, list[int]]],
) -> None:
    pair = Pair(admission, expiry, kind, optimizer)
    for what, seed, ids in operations:
        pair.do(what, seed, ids)
    pair.check()


def test_what_is_kept_with_rows_goes_and_moves_with_them() -> None:
    lifetime = LifetimeRules(expiry=ExpirySettings(age_steps=2))
    own = LocalRows(1, InitialValues(InitialKind.ZEROS), 0, lifetime)
    adagrad = "adagrad", make_group("adagrad", {})
    own.update(np.arange(4), np.arange(4, dtype=np.float32)[:, None], *adagrad, 1)
    own.update(np.array([1, 3]), np.ones((2, 1), np.float32), *adagrad, 3)
    own.update(np.empty(0, np.int64), np.empty((0, 1), np.float32), *adagrad, 4)
    own.drop(own.expired())
    ids, state = own.kept()
    assert (ids.tolist(), state["sum"].tolist()) == ([1, 3], [[2.0], [10.0]])
    own.update(np.array([0]), np.ones((1, 1), np.float32), *adagrad, 4)
    ids, state = own.kept()
    assert (ids.tolist(), state["sum"].tolist()) == ([0, 1, 3], [[1.0], [2.0], [10.0]])
