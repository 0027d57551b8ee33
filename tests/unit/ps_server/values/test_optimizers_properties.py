"""What holds for every update rule, length and cut: servers may split tensors wherever they like, unless the rule needs
whole variables."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.optimizers import KINDS, WHOLE_VARIABLES, make_group
from shardyard_ps_server.values import optimizers
from tests.support.dense_rules import take_step

Run = tuple[npt.NDArray[np.floating], list[npt.NDArray[np.floating]]]

RULES = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        st.fixed_dictionaries(
            {
                setting.name: st.sampled_from([0.0, 1.0] if setting.flag else [0.0, 0.05, 0.6, 0.9])
                for setting in KINDS[kind]
            }
        ),
    )
)


def _updates(kind: str, group: tuple[float, ...], w: np.ndarray, gradients: np.ndarray) -> Run:
    rule = optimizers.make(kind)
    state = [np.full_like(w, slot.initial) for slot in rule.slots(group)]
    for count, g in enumerate(gradients, start=1):
        w_out = np.full_like(w, np.nan)
        take_step(rule, group, count, w, g, w_out, state)
        w = w_out
    return w, state


def _bits(run: Run) -> list[bytes]:
    # NaN's sign and payload are not part of the promise
    return [np.where(np.isnan(array), np.nan, array).astype(array.dtype).tobytes() for array in (run[0], *run[1])]


def _data(dtype: str, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(length).astype(dtype), rng.standard_normal((3, length)).astype(dtype)


@settings(max_examples=150, deadline=None)
@given(
    rule=RULES.filter(lambda rule: rule[0] not in WHOLE_VARIABLES),
    dtype=st.sampled_from(["float32", "float64"]),
    length=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_arrays_cut_anywhere_give_the_same_bits(
    rule: tuple[str, dict[str, float]], dtype: str, length: int, cuts: list[int], seed: int
) -> None:
    kind, values = rule
    group = make_group(kind, values)
    w, gradients = _data(dtype, length, seed)
    whole = _updates(kind, group, w, gradients)
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    runs = [
        _updates(kind, group, w[a:b], [np.ascontiguousarray(g[a:b]) for g in gradients])  # type: ignore[arg-type]
        for a, b in itertools.pairwise(edges)
    ]
    if runs:
        joined = (
            np.concatenate([run[0] for run in runs]),
            [np.concatenate(arrays) for arrays in zip(*(run[1] for run in runs), strict=True)],
        )
        assert _bits(joined) == _bits(whole)


@settings(max_examples=60, deadline=None)
@given(rule=RULES, dtype=st.sampled_from(["float32", "float64"]), length=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_maximizing_is_minimizing_the_opposite(
    rule: tuple[str, dict[str, float]], dtype: str, length: int, seed: int
) -> None:
    kind, values = rule
    w, gradients = _data(dtype, length, seed)
    up = _updates(kind, make_group(kind, {**values, "maximize": 1.0}), w, gradients)
    down = _updates(kind, make_group(kind, {**values, "maximize": 0.0}), w, -gradients)
    assert _bits(up) == _bits(down)
