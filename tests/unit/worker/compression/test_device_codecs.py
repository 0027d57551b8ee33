"""Encoders in torch operations, held against those of shardyard.codecs: the same bytes, and the same state behind them.

Here the device is the CPU; tests/gpu has the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardyard.codecs.dense import topk as host_topk
from shardyard.codecs.dense.decoding import decode
from shardyard.codecs.dense.encoding import encode, encode_feedback, encode_low_rank, first_factor
from shardyard.codecs.dense.powersgd import grid_of
from shardyard.codecs.format.form import CodeId
from shardyard.domain.compression import parse_codec, sent_count
from shardyard_worker.compression import device_codecs
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies
from tests.support.feedback_states import KEPT, gradients, layout, on_device, on_host, push, same

torch.set_num_threads(1)

STATELESS = ("none", "bf16", "fp16", "qsgd", "qsgd:1:64", "qsgd:127:16", "randomk:0.05:unbiased")
WITH_FEEDBACK = ("int8", "int8:16", "onebit", "onebit:16", "randomk:0.05", "randomk:0.4")
KEY = 0xDEADBEEFCAFEBABE


def fetch(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return DeviceCopies().to_host(tensors)


def run(encoding: device_codecs.Encoding):
    (made,) = device_codecs.run([encoding], fetch)
    return made


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())


def same_bits(left: np.ndarray, right: torch.Tensor) -> None:
    np.testing.assert_array_equal(left.view(np.uint8), right.numpy().view(np.uint8))


def same_code(code: memoryview, expected: memoryview, like: np.ndarray) -> None:
    """The same bytes; a NaN may be another one."""
    if bytes(code) == bytes(expected):
        return
    assert (code[0], expected[0]) == (CodeId.RAW, CodeId.RAW)
    left, right = np.empty_like(like), np.empty_like(like)
    decode(code, left)
    decode(expected, right)
    np.testing.assert_array_equal(left, right)
    assert np.isnan(left).any()


@st.composite
def blocks(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """Of sizes and values at which codecs go wrong: tiny, huge, equal, zero, not finite; and as gradients are."""
    n = draw(st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 31, 64, 100, 257, 1_024, 1_025, 5_000]))
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        scale = draw(st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e20]))
        values = (scale * rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(dtype)
        values[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 0.999]))] = 0
        return values
    width = 32 if dtype == "float32" else 64
    some = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, 1e-38, 3e38, -3.3e38, np.inf, -np.inf, np.nan])
    return draw(arrays.arrays(dtype, min(n, 64), elements=some | st.floats(width=width), fill=st.just(0.5)))


dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@dtypes
@pytest.mark.parametrize("text", STATELESS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_same_bytes_without_feedback(text: str, dtype: str, data: st.DataObject) -> None:
    values, codec = data.draw(blocks(dtype)), parse_codec(text)
    with np.errstate(all="ignore"):
        expected = encode(codec, values, KEY)
    same_code(run(device_codecs.encode(codec, tensor(values), KEY)), expected, values)


@dtypes
@pytest.mark.parametrize("text", WITH_FEEDBACK)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_same_bytes_and_residual_with_feedback(text: str, dtype: str, data: st.DataObject) -> None:
    values, codec = data.draw(blocks(dtype)), parse_codec(text)
    before = np.roll(values, 1) * np.asarray(0.5, dtype)
    after = np.empty_like(values)
    with np.errstate(all="ignore"):
        expected = encode_feedback(codec, values, before, after, KEY)
    code, left = run(device_codecs.encode_feedback(codec, tensor(values), tensor(before), KEY))
    same_code(code, expected, values)
    same_bits(after, left)


@dtypes
@pytest.mark.parametrize("values_as", ["fp32", "fp16", "int8"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_same_largest(values_as: str, dtype: str, data: st.DataObject) -> None:
    values = data.draw(blocks(dtype))
    density = data.draw(st.sampled_from([1e-6, 0.01, 0.1, 0.5]))
    momentum = data.draw(st.sampled_from([0.0, 0.9]))
    factor = data.draw(st.sampled_from([1.0, 0.3]))
    count = sent_count(values.size, density)
    u, v = np.roll(values, 1), np.roll(values, 2) * np.asarray(0.5, dtype)
    host_u = u if momentum else np.empty(0, dtype)
    after = np.empty_like(host_u), np.empty_like(v)
    with np.errstate(all="ignore"):
        expected = host_topk.encode_momentum(values, (host_u, v), after, count, KEY, values_as, factor, momentum)
    before = (tensor(u) if momentum else None, tensor(v))
    code, (left_u, left_v) = run(
        device_codecs.encode_largest(tensor(values), before, count, KEY, values_as, factor, momentum)
    )
    if expected is None:
        assert code[0] == CodeId.RAW
        assert not left_v.any()
        assert left_u is None or not left_u.any()
        return
    assert bytes(code) == bytes(expected)
    same_bits(after[1], left_v)
    if momentum:
        same_bits(after[0], left_u)


@dtypes
@pytest.mark.parametrize("density", [0.001, 0.05, 0.5])
def test_threshold_of_a_sample_finds_the_same(density: str, dtype: str) -> None:
    """Blocks larger than a sample, with values that come again and again."""
    rng = np.random.default_rng(0)
    for values in (rng.standard_normal(70_000), rng.integers(-3, 4, 70_000) * 0.25, np.ones(70_000)):
        given_, zeros = values.astype(dtype), np.zeros(70_000, dtype)
        count, none, after = sent_count(70_000, density), np.empty(0, dtype), np.empty(70_000, dtype)
        expected = host_topk.encode_momentum(given_, (none, zeros), (none, after), count, KEY, "fp32", 1.0, 0.0)
        code, (_, left) = run(device_codecs.encode_largest(tensor(given_), (None, tensor(zeros)), count, KEY, "fp32"))
        assert expected is not None
        assert bytes(code) == bytes(expected)
        same_bits(after, left)


@dtypes
@pytest.mark.parametrize(("shape", "rank"), [((80, 60), 2), ((300, 7), 1), ((64, 64), 4), ((30, 40), 60)])
@pytest.mark.parametrize("offset", [0, 37])
def test_low_rank_is_as_good_as_the_hosts(shape: tuple[int, int], rank: int, offset: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    n = shape[0] * shape[1] - offset - 5
    low = rng.standard_normal((shape[0], 2)) @ rng.standard_normal((2, shape[1]))
    gradient = (low + 0.1 * rng.standard_normal(shape)).astype(dtype).ravel()[offset : offset + n]
    before = (0.1 * rng.standard_normal(n)).astype(dtype)
    grid = grid_of(shape, offset, n, rank)
    factor = first_factor(rank, grid.columns, 3)
    after = np.empty_like(gradient)
    expected, host_factor = encode_low_rank(gradient, before, after, grid, factor)
    code, left, made, copied = run(
        device_codecs.encode_low_rank(tensor(gradient), tensor(before), grid, torch.from_numpy(factor))
    )
    assert len(code) == len(expected)
    assert code[0] == expected[0]
    received = np.empty_like(gradient)
    decode(code, received)
    np.testing.assert_allclose(received + left.numpy(), gradient + before, atol=1e-5)
    assert np.linalg.norm(left.numpy()) <= np.linalg.norm(gradient + before) * (1 + 1e-5)
    np.testing.assert_allclose(np.linalg.norm(left.numpy()), np.linalg.norm(after), rtol=1e-3, atol=1e-5)
    if copied is None:
        assert code[0] == CodeId.RAW
        assert not left.any()
    else:
        np.testing.assert_array_equal(made.numpy(), copied)
        np.testing.assert_allclose(copied, host_factor, rtol=1e-3, atol=1e-3)


def test_gradient_of_lower_rank_gives_zeros_of_a_factor() -> None:
    gradient = np.outer(np.arange(1, 65), np.ones(64)).astype(np.float32).ravel()
    grid = grid_of((64, 64), 0, 4_096, 3)
    _, left, _, copied = run(
        device_codecs.encode_low_rank(
            tensor(gradient), torch.zeros(4_096), grid, torch.from_numpy(first_factor(3, 64, 0))
        )
    )
    assert [bool(row.any()) for row in copied] == [True, False, False]
    assert left.abs().max() < 1e-3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.2e38])
def test_low_rank_of_what_is_not_finite_travels_whole(bad: float) -> None:
    gradient = np.ones(4_096, np.float32)
    gradient[7] = bad
    grid = grid_of((64, 64), 0, 4_096, 2)
    factor = torch.from_numpy(100 * first_factor(2, 64, 0))
    code, left, made, copied = run(device_codecs.encode_low_rank(tensor(gradient), torch.zeros(4_096), grid, factor))
    assert code[0] == CodeId.RAW
    assert not left.any()
    assert made is factor
    assert copied is None


@pytest.mark.parametrize("text", [*STATELESS, "int8+zstd", "bf16+zstd", "qsgd:1+zstd"])
def test_block_of_no_elements(text: str) -> None:
    codec, nothing = parse_codec(text), np.empty(0, np.float32)
    expected = bytes(encode(codec, nothing, KEY))
    if codec.has_feedback:
        code, _ = run(device_codecs.encode_feedback(codec, tensor(nothing), tensor(nothing), KEY))
    else:
        code = run(device_codecs.encode(codec, tensor(nothing), KEY))
    assert bytes(code) == expected


def test_many_are_fetched_together() -> None:
    waits = []

    def counting(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        waits.append(len(tensors))
        return fetch(tensors)

    bad = torch.full((100,), torch.nan)
    some = torch.randn(100)
    made = device_codecs.run(
        [device_codecs.encode(parse_codec("bf16"), each) for each in (some, bad, some)]
        + [device_codecs.encode(parse_codec("none"), some)],
        counting,
    )
    assert [code[0] for code in made] == [CodeId.BF16, CodeId.RAW, CodeId.BF16, CodeId.RAW]
    assert waits == [7, 1]
    assert device_codecs.run([], counting) == []


# --- what is kept


exact = [each for each in KEPT if "powersgd" not in each[0] and "clip" not in each[1]]
by_rules = pytest.mark.parametrize(("rules", "more"), KEPT, ids=[rules for rules, _ in KEPT])
by_exact_rules = pytest.mark.parametrize(("rules", "more"), exact, ids=[rules for rules, _ in exact])


@by_exact_rules
def test_pushes_of_a_device_are_the_hosts(rules: str, more: dict[str, float]) -> None:
    host, device = on_host(rules, **more), on_device(rules, **more)
    for step in range(6):
        given_ = gradients(step)
        if step == 3:
            given_[0][5] = np.nan
        assert push(host, given_)[1] == push(device, given_)[1], step
    assert same(host.state_dict(), device.state_dict())
    assert device.lost_norm == pytest.approx(host.lost_norm, rel=1e-5)
    assert device.residuals().keys() == host.residuals().keys()


@by_rules
@pytest.mark.parametrize("from_device", [True, False])
def test_state_of_one_is_the_others(rules: str, more: dict[str, float], from_device: bool) -> None:
    giving = on_device(rules, **more) if from_device else on_host(rules, **more)
    taking = on_host(rules, **more) if from_device else on_device(rules, **more)
    for step in range(3):
        push(giving, gradients(step))
    saved = giving.state_dict()
    taking.load_state_dict(saved)
    assert same(taking.state_dict(), saved)
    mine, theirs = push(giving, gradients(3)), push(taking, gradients(3))
    for index in range(3):
        np.testing.assert_allclose(mine[0][index], theirs[0][index], rtol=1e-3, atol=1e-3)
    if (rules, more) in exact:
        assert mine[1] == theirs[1]
    assert same(saved, saved | {})


@by_exact_rules
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("was_there", [True, False])
def test_device_that_goes_back_in_the_midst_of_a_push_has_what_the_host_has(
    rules: str, more: dict[str, float], counts: bool, was_there: bool
) -> None:
    saved = on_host(rules, **more)
    if was_there:
        push(saved, gradients(0))
    states = on_host(rules, **more), on_device(rules, **more)
    for state in states:
        for step in range(3):
            push(state, gradients(step))
        state.go_back(saved.state_dict() if was_there else {})
        state.commit() if counts else state.undo()
    host, device = (state.state_dict() for state in states)
    assert host.keys() == device.keys()
    for name in host:
        np.testing.assert_allclose(device[name], host[name], rtol=1e-5, atol=1e-5)
    if not counts:
        before = saved.state_dict()
        assert all(np.array_equal(device[name], before[name]) for name in device if name.startswith("residual"))


def test_what_was_saved_does_not_change() -> None:
    state = on_device("topk:0.01", momentum=0.5)
    push(state, gradients(0))
    saved = state.state_dict()
    copied = {name: value.copy() for name, value in saved.items()}
    push(state, gradients(1))
    assert same(saved, copied)


def test_autocast_changes_no_code() -> None:
    plain, cast = on_device("powersgd:2"), on_device("powersgd:2")
    expected = push(plain, gradients(0))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert push(cast, gradients(0))[1] == expected


def test_gradients_are_read_and_not_kept() -> None:
    """What was given may be changed at once, as `zero_grad(set_to_none=False)` does."""
    given_ = gradients(0)
    state, other = on_device("int8"), on_device("int8")
    push(other, gradients(0))
    tensors = [torch.from_numpy(each) for each in given_]
    blocks_ = [block for partition in layout().partitions for block in partition.blocks]
    state.encode([(b, tensors[b.variable][b.offset : b.offset + b.length]) for b in blocks_])
    for each in tensors:
        each.zero_()
    assert same(state.state_dict(), other.state_dict())
