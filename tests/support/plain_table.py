"""A table as a dictionary: the expected results of shardyard_ps_server.tables, row by row in numpy's float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardyard.domain.tables.row_values import initial_rows, row_key
from shardyard.domain.tables.splitmix_loops import drawn, mixed
from shardyard.domain.tables.table_settings import Admission, TableSettings

F = np.float32
Row = np.ndarray


@dataclass
class Entry:
    row: Row | None
    """Values, then state."""
    frequency: int
    step: int
    """The step of its last push; the time of it where the table measures ages in time."""


@dataclass
class PlainTable:
    settings: TableSettings
    entries: dict[int, Entry] = field(default_factory=dict)
    cells: bytearray = field(default_factory=bytearray)

    def look_up(self, ids: list[int]) -> Row:
        out = np.zeros((len(ids), self.settings.dim), F)
        for i, number in enumerate(ids):
            entry = self.entries.get(number)
            if entry is not None and entry.row is not None:
                out[i] = entry.row[: self.settings.dim]
            elif not self.settings.admission.zeros:
                out[i] = self.initial(number)
        return out

    def push(self, ids: list[int], gradients: Row | None, step: int, counts: list[int], now_ms: int = 0) -> None:
        admission, expiry = self.settings.admission, self.settings.expiry
        time = (now_ms if expiry.age_ms or expiry.grace_ms else step) // expiry.age_unit * expiry.age_unit
        before = [0] * len(ids)
        if admission.kind is Admission.ESTIMATE:
            before = [self.estimate(number, counts[i]) for i, number in enumerate(ids)]
        for i, number in enumerate(ids):
            if number not in self.entries and not self.is_counted(number, before[i] + counts[i], step):
                continue
            entry = self.entries.setdefault(number, Entry(None, before[i], 0))
            entry.frequency = min(entry.frequency + counts[i], 65_535)
            entry.step = max(entry.step, time)
            if entry.row is None and (admission.kind is not Admission.COUNT or entry.frequency >= admission.threshold):
                entry.row = np.concatenate([self.initial(number), self.fresh(self.initial(number))])
            if entry.row is not None and gradients is not None:
                update(self.settings, entry.row, gradients[i], step)

    def is_counted(self, number: int, times: int, step: int) -> bool:
        """Whether an id that has no entry gets one."""
        admission = self.settings.admission
        if admission.kind is Admission.CHANCE:
            key = row_key(row_key(self.settings.seed, self.settings.name), f"{step}")
            return int(drawn(word_of(number, key), 0)) < min(int(admission.chance * 2.0**64), 2**64 - 1)
        return admission.kind is not Admission.ESTIMATE or times >= admission.threshold

    def estimate(self, number: int, times: int) -> int:
        """Counts the id. Returns the estimate of how often it was counted before."""
        size = self.settings.admission.cells
        if not self.cells:
            self.cells = bytearray(size)
        word = int(word_of(number, row_key(self.settings.seed, self.settings.name)))
        line = ((word >> 32) * (size // 64) >> 32) * 64
        places = [line + (word >> 6 * probe & 63) for probe in range(4)]
        fewest = min(self.cells[at] for at in places)
        for at in places:
            self.cells[at] = max(self.cells[at], min(fewest + times, 255))
        return fewest

    def swept(self, step: int, now_ms: int, besides: set[int]) -> set[int]:
        """The ids that a sweep removes."""
        frequencies = {number: entry.frequency for number, entry in self.entries.items() if entry.row is not None}
        too_many = len(frequencies) - self.settings.expiry.rows_kept
        gone = self.expired(step, now_ms) - besides
        if self.settings.expiry.rows_kept and too_many > 0:
            fewest = sorted(frequencies.values())[too_many - 1]
            gone |= {number for number, frequency in frequencies.items() if frequency < fewest} - besides
            going = sum(frequencies.get(number, fewest + 1) <= fewest for number in gone)
            tied = {number for number, frequency in frequencies.items() if frequency == fewest} - gone - besides
            gone |= set(sorted(tied, key=lambda number: int(word_of(number, step)))[: max(too_many - going, 0)])
        return gone

    def expired(self, step: int, now_ms: int = 0) -> set[int]:
        """The ids that expire in a walk through the whole table. Rows beyond `rows_kept` are not among them."""
        expiry = self.settings.expiry
        by_time = expiry.age_ms or expiry.grace_ms
        longest, grace = (expiry.age_ms, expiry.grace_ms) if by_time else (expiry.age_steps, expiry.grace_steps)
        unit, gone = expiry.age_unit, set()
        for number, entry in self.entries.items():
            age = (now_ms if by_time else step) // unit - entry.step // unit
            if longest and age > longest // unit:
                gone.add(number)
            elif age >= grace // unit:
                values = np.zeros(0, F) if entry.row is None else entry.row[: self.settings.dim]
                small = entry.row is not None and sum(float(value) ** 2 for value in values) < expiry.norm_min**2
                if entry.frequency < expiry.frequency_min or small:
                    gone.add(number)
        return gone

    def initial(self, number: int) -> Row:
        settings = self.settings
        key = row_key(settings.seed, settings.name)
        return initial_rows(np.array([number]), settings.dim, settings.initial, key)[0]

    def fresh(self, values: Row) -> Row:
        settings, dim = self.settings, self.settings.dim
        kind, group = settings.optimizer, settings.group
        if kind == "sgd":
            return np.zeros(dim if group[1] else 0, F)
        if kind in ("adagrad", "rowwise_adagrad"):
            return np.full(dim if kind == "adagrad" else 1, group[3], F)
        if kind == "ftrl":
            return np.concatenate([-(F(group[1]) / F(group[0])) * values, np.zeros(dim, F)])
        return np.zeros((3 if group[5] else 2) * dim, F)


def word_of(number: int, key: int) -> np.uint64:
    return np.uint64(mixed(np.uint64((number ^ key) & (2**64 - 1))))


def update(settings: TableSettings, row: Row, g: Row, step: int) -> None:
    """In place, with the operations of torch.optim's single-tensor functions (shardyard_ps_server.values.kernels)."""
    dim, kind, group = settings.dim, settings.optimizer, settings.group
    w, state = row[:dim], row[dim:]
    sign = F(-1) if group[-1] else F(1)
    if kind == "sgd":
        lr, momentum, dampening, decay, nesterov, _ = group
        x = slope(g, w, sign, decay)
        if momentum:
            keep = F(1.0 if step == 1 else 1 - dampening)
            state[:] = F(momentum) * state + keep * x
            x = x + F(momentum) * state if nesterov else state
        w[:] = w - F(lr) * x
    elif kind in ("adagrad", "rowwise_adagrad"):
        lr, lr_decay, decay, _, eps, _ = group
        x = slope(g, w, sign, decay)
        if kind == "adagrad":
            state[:] = state + x * x
        else:
            state[0] = state[0] + lanes(x * x) / F(dim)
        w[:] = w - F(lr / (1 + (step - 1) * lr_decay)) * x / (np.sqrt(state) + F(eps))
    elif kind == "ftrl":
        lr, beta, l1, l2, _ = (F(each) for each in group)
        z, n = state[:dim], state[dim:]
        x = sign * g
        total = n + x * x
        root = np.sqrt(total)
        z[:] = z + (x - (root - np.sqrt(n)) / lr * w)
        n[:] = total
        solution = (np.where(z > 0, l1, -l1) - z) / ((beta + root) / lr + l2)
        w[:] = np.where(np.abs(z) <= l1, F(0), solution)
    else:
        lr, beta1, beta2, eps, decay, amsgrad, _ = group
        root2 = (1 - beta2**step) ** 0.5
        m, v = state[:dim], state[dim : 2 * dim]
        x = slope(g, w, sign, 0.0 if kind == "adamw" else decay)
        shrink = F(1 - lr * decay) if kind == "adamw" else F(1)
        m[:] = lerp(m, x, F(1 - beta1))
        v[:] = F(beta2) * v + F(1 - beta2) * x * x
        second = v
        if amsgrad:
            largest = state[2 * dim :]
            largest[:] = np.maximum(largest, v)
            second = largest
        after = F(eps / root2 if kind == "sparse_adam" else eps)
        w[:] = shrink * w - F(lr / (1 - beta1**step)) * m / (np.sqrt(second) / F(root2) + after)


def slope(g: Row, w: Row, sign: np.float32, decay: float) -> Row:
    x = sign * g
    return x + F(decay) * w if F(decay) != 0 else x


def lerp(start: Row, end: Row, weight: np.float32) -> Row:
    return start + weight * (end - start) if weight < 0.5 else end - (F(1) - weight) * (end - start)


def lanes(squares: Row) -> np.float32:
    """Eight sums, each over every eighth element, in order."""
    sums = [F(0)] * 8
    for d, square in enumerate(squares):
        sums[d % 8] = sums[d % 8] + square
    a, b, c, d, e, f, g, h = sums
    return ((a + e) + (b + f)) + ((c + g) + (d + h))
