"""What a worker keeps between pushes: sums, undoing, warm-up, momentum, saving and leaving."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from shardyard.codecs.format.form import CodeId
from shardyard.domain.errors import ConfigurationError, DTypeMismatch, ShapeMismatch, UnknownVariable
from shardyard.domain.optimizers import OptimizerSpec
from shardyard_worker.compression.block_state import density_at
from shardyard_worker.compression.error_feedback import ErrorFeedback
from tests.support.feedback_states import KEPT, VARIABLES, gradients, layout, on_device, on_host, piece, push, same

Make = Callable[..., ErrorFeedback]
CODECS = ("int8", "int8:64+zstd", "onebit:64", "topk:0.01", "topk:0.05:int8", "randomk:0.05", "powersgd:2")
by_codec = pytest.mark.parametrize("codec", CODECS)


HOSTS = [pytest.param(partial(on_host, codec), id=codec) for codec in CODECS]
DEVICES = [pytest.param(partial(on_device, rules, **more), id=f"device {rules} {more}") for rules, more in KEPT]
SUMMED = [
    pytest.param(partial(on_device, rules), id=f"device {rules}")
    for rules in ("int8:64+zstd", "onebit:64", "topk:0.05:int8", "fc1*=powersgd:2 *=int8")
]
by_state = pytest.mark.parametrize("make", [*HOSTS, *DEVICES])
by_place = pytest.mark.parametrize("make", [on_host, on_device])


def test_only_what_the_rules_name_is_coded() -> None:
    state = on_host("fc2*=none *=onebit:64")
    received, codes = push(state, gradients(0))
    for index in (1, 2, 3):
        np.testing.assert_array_equal(received[index], gradients(0)[index])
    assert sorted(code[0] for code in codes) == sorted([CodeId.ONEBIT] * 2 + [CodeId.RAW] * 5)


@pytest.mark.parametrize("make", [*HOSTS, *SUMMED])
def test_sent_and_residual_add_up_to_all_gradients(make: Make) -> None:
    state = make()
    sent, total = gradients(99), gradients(99)
    for step in range(20):
        given = gradients(step)
        received, _ = push(state, given)
        for index in range(3):
            sent[index] = sent[index] + received[index]
            total[index] = total[index] + given[index]
    left = state.residuals()
    assert set(left) == {0, 2}
    for index in (0, 2):
        assert left[index].dtype == VARIABLES[index].dtype.value
        np.testing.assert_allclose(sent[index] + left[index], total[index], atol=1e-4)
    np.testing.assert_array_equal(sent[1], total[1])
    assert state.lost_norm == pytest.approx(np.sqrt(sum(np.sum(each**2) for each in left.values())), rel=1e-5)
    assert state.lost_norm > 0


@by_place
@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "qsgd", "randomk:0.05:unbiased"])
def test_codecs_without_feedback_keep_nothing(codec: str, make: Make) -> None:
    state = make(codec)
    push(state, gradients(0))
    assert state.residuals() == {}
    assert state.lost_norm == 0
    assert list(state.state_dict()) == ["pushes"]


# --- pushes that do not count


@by_state
def test_undone_push_leaves_no_trace(make: Make) -> None:
    state, other = make(), make()
    for step in range(3):
        push(state, gradients(step))
        push(other, gradients(step))
    push(state, gradients(77))
    state.undo()
    assert same(state.state_dict(), other.state_dict())
    assert push(state, gradients(3))[1] == push(other, gradients(3))[1]


@by_codec
def test_first_push_can_be_undone(codec: str) -> None:
    state = on_host(codec)
    push(state, gradients(0))
    state.undo()
    assert state.residuals() == {}
    assert state.lost_norm == 0


@by_state
def test_push_can_be_undone_in_one_partition_alone(make: Make) -> None:
    state, other = make(), make()
    push(state, gradients(0))
    push(other, gradients(0))
    before = other.state_dict()
    push(state, gradients(1))
    push(other, gradients(1))
    after = other.state_dict()
    lost = layout().partitions[1].blocks
    state.undo(lost)
    state.undo(lost)  # twice is once
    state.commit()
    for name, value in state.state_dict().items():
        if not name.startswith(("residual", "momentum")):
            continue
        middle = value.size // 2
        np.testing.assert_array_equal(value[:middle], after[name][:middle])
        np.testing.assert_array_equal(value[middle:], before[name][middle:])


def test_push_that_counts_is_not_undone() -> None:
    state = on_host("int8")
    push(state, gradients(0))
    state.commit()
    saved = state.state_dict()
    state.undo()
    assert same(state.state_dict(), saved)


def test_block_is_encoded_once_a_push() -> None:
    block = layout().partitions[0].blocks[0]
    with pytest.raises(AssertionError, match="twice"):
        on_host("int8").encode([(block, piece(block, gradients(0)))] * 2)


# --- what is drawn


@pytest.mark.parametrize("codec", ["qsgd", "randomk:0.05", "randomk:0.05:unbiased", "topk:0.01", "powersgd:2"])
def test_run_can_be_repeated(codec: str) -> None:
    first, second = on_host(codec), on_host(codec)
    for step in range(3):
        assert push(first, gradients(step))[1] == push(second, gradients(step))[1]


@pytest.mark.parametrize("codec", ["qsgd", "randomk:0.05"])
def test_workers_and_pushes_draw_differently(codec: str) -> None:
    one, two = on_host(codec, worker=1), on_host(codec, worker=2)
    first = push(one, gradients(0))[1]
    assert first != push(two, gradients(0))[1]
    assert first[0] != push(one, gradients(0))[1][0]


# --- deep gradient compression


def test_density_falls_by_quarters_to_its_own() -> None:
    seen = [density_at(step, 0.001, 8) for step in range(10)]
    assert seen == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]
    assert density_at(0, 0.001, 0) == 0.001
    assert density_at(0, 0.3, 100) == 0.3
    assert [density_at(step, 0.0625, 2) for step in range(3)] == [0.25, 0.25, 0.0625]
    assert all(density_at(step, 0.01, 3) >= 0.01 for step in range(5))


def test_warm_up_sends_more_at_first() -> None:
    state = on_host("topk:0.001", warmup_steps=4)
    counts = [np.count_nonzero(push(state, gradients(step))[0][0]) for step in range(6)]
    assert counts == [1_200, 300, 76, 18, 4, 4]


def test_momentum_is_corrected_and_masked() -> None:
    """Held against the paper's algorithm, written down plainly."""
    state = on_host("topk:0.01", pieces=1, momentum=0.9)
    u, v = np.zeros(4_800, np.float32), np.zeros(4_800, np.float32)
    for step in range(10):
        given = gradients(step)
        received, _ = push(state, given, pieces=1)
        u = np.float32(0.9) * u + given[0]
        v = v + u
        largest = np.argsort(-np.abs(v), kind="stable")[:48]
        expected = np.zeros_like(v)
        expected[largest] = v[largest]
        np.testing.assert_allclose(received[0], expected, rtol=1e-6)
        u[largest], v[largest] = 0, 0
    saved = state.state_dict()
    np.testing.assert_allclose(saved["momentum.fc1.weight"], u, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(saved["residual.fc1.weight"], v, rtol=1e-5, atol=1e-6)


@by_place
@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
def test_momentum_on_both_sides_is_refused(kind: str, make: Make) -> None:
    values = {"sgd": (0.1, 0.9, 0, 0, 0, 0), "rmsprop": (0.1, 0.99, 1e-8, 0, 0.9, 0, 0)}[kind]
    theirs = OptimizerSpec(kind, (values,))
    with pytest.raises(ConfigurationError, match="both would square it"):
        make("topk:0.01", theirs, momentum=0.9)
    make("topk:0.01", momentum=0.9)
    make("topk:0.01", theirs)


@by_place
def test_gradient_is_clipped_as_a_whole_and_buffers_are_not(make: Make) -> None:
    given = gradients(0)
    norm = np.sqrt(sum(np.sum(each.astype(float) ** 2) for each in given[:3]))
    state = make("fc2*=none *=topk:0.5", clip=1.0)
    received, _ = push(state, given)
    np.testing.assert_allclose(received[0] + state.residuals()[0], given[0] / norm, rtol=1e-5)
    np.testing.assert_allclose(received[1], given[1] / norm, rtol=1e-5)
    np.testing.assert_allclose(received[2], given[2] / norm, rtol=1e-6)
    np.testing.assert_array_equal(received[3], given[3])
    short = [(each / (2 * norm)).astype(each.dtype) for each in given]
    np.testing.assert_array_equal(push(make("topk:0.5", clip=1.0), short)[0][1], short[1])


# --- what is not finite


@by_codec
def test_gradient_that_is_not_finite_reaches_the_servers(codec: str) -> None:
    state = on_host(codec)
    push(state, gradients(0))
    bad = gradients(1)
    bad[0][5] = np.nan
    received, _ = push(state, bad)
    assert np.isnan(received[0][5])
    assert np.isfinite(state.lost_norm)
    received, _ = push(state, gradients(2))
    assert np.isfinite(received[0]).all()


def test_momentum_starts_anew_after_a_gradient_that_is_not_finite() -> None:
    state = on_host("topk:0.01", momentum=0.9)
    bad = gradients(1)
    bad[0][5] = np.inf
    assert push(state, bad)[0][0][5] == np.inf
    assert not state.state_dict()["momentum.fc1.weight"][:2_400].any()
    assert np.isfinite(push(state, gradients(2))[0][0]).all()


# --- saved, restored, handed over


@pytest.mark.parametrize(("codec", "more"), [*((codec, {}) for codec in CODECS), ("topk:0.01", {"momentum": 0.9})])
def test_restored_worker_sends_the_same_bytes(codec: str, more: dict[str, float]) -> None:
    state, other = on_host(codec, **more), on_host(codec, **more)
    for step in range(3):
        push(state, gradients(step))
    saved = state.state_dict()
    push(state, gradients(55))  # what was saved does not change with it
    other.load_state_dict(saved)
    assert same(other.state_dict(), saved)
    state.load_state_dict(saved)
    assert push(state, gradients(3))[1] == push(other, gradients(3))[1]


def test_state_is_named_after_variables() -> None:
    state = on_host("topk:0.01", momentum=0.5)
    assert list(state.state_dict()) == [
        "pushes",
        "residual.fc1.weight",
        "residual.fc2.weight",
        "momentum.fc1.weight",
        "momentum.fc2.weight",
    ]
    low_rank = on_host("powersgd:2")
    push(low_rank, gradients(0))
    assert "factor.fc1.weight@2400" in low_rank.state_dict()


@by_codec
def test_state_fits_blocks_that_are_cut_otherwise(codec: str) -> None:
    state, other = on_host(codec, pieces=2), on_host(codec, pieces=3)
    push(state, gradients(0))
    other.load_state_dict(state.state_dict())
    for index, left in state.residuals().items():
        np.testing.assert_array_equal(other.residuals()[index], left)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("residual.fc9.weight", np.zeros(3), UnknownVariable),
        ("residual.fc1.bias", np.zeros(80, np.float32), UnknownVariable),
        ("momentum.fc1.weight", np.zeros(4_800, np.float32), UnknownVariable),
        ("other", np.zeros(3), UnknownVariable),
        ("factor.fc1.weight", np.zeros(3), UnknownVariable),
        ("residual.fc1.weight", np.zeros((80, 60), np.float32), ShapeMismatch),
        ("residual.fc1.weight", np.zeros(4_800), DTypeMismatch),
    ],
)
@by_place
def test_wrong_state_is_refused_and_changes_nothing(
    name: str, value: np.ndarray, error: type[Exception], make: Make
) -> None:
    state = make("int8")
    push(state, gradients(0))
    saved = state.state_dict()
    with pytest.raises(error):
        state.load_state_dict({"residual.fc2.weight": np.ones(3_200), name: value})
    assert same(state.state_dict(), saved)


@by_place
def test_another_worker_can_take_over_what_was_not_sent(make: Make) -> None:
    leaving, staying = make("onebit:64", worker=1), make("onebit:64", worker=2)
    push(leaving, gradients(0))
    push(staying, gradients(1))
    mine = staying.residuals()
    staying.absorb(leaving.residuals())
    for index, left in leaving.residuals().items():
        np.testing.assert_allclose(staying.residuals()[index], mine[index] + left, rtol=1e-6)
    with pytest.raises(ShapeMismatch):
        staying.absorb({0: np.zeros(3, np.float32)})


# ---- the job goes back


def without_factors(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A warm start is worth nothing after another past."""
    return {name: value for name, value in state.items() if not name.startswith("factor.")}


@by_codec
@pytest.mark.parametrize("counts", [True, False])
def test_push_under_way_when_the_job_goes_back_counts_for_the_residual_of_then(codec: str, counts: bool) -> None:
    """It was made with the residual of now, and counts, if it does, for servers that have what they had then."""
    state = on_host(codec)
    push(state, gradients(0))
    saved = state.state_dict()
    for step in (1, 2):
        push(state, gradients(step))
    given = gradients(3)
    received, _ = push(state, given)
    state.go_back(saved)
    if not counts:
        state.undo()
        assert same(without_factors(state.state_dict()), without_factors(saved))
        return
    state.commit()
    assert state.state_dict()["pushes"] == saved["pushes"] + 1
    for index in (0, 2):
        then = saved[f"residual.{VARIABLES[index].name}"]
        np.testing.assert_allclose(
            received[index] + state.residuals()[index], given[index] + then, rtol=1e-3, atol=1e-3 * abs(then).max()
        )


def test_momentum_of_a_push_under_way_is_that_of_then() -> None:
    state = on_host("topk:0.05", momentum=0.9)
    push(state, gradients(0))
    saved = state.state_dict()
    push(state, gradients(1))
    push(state, gradients(2))
    state.go_back(saved)
    assert np.array_equal(state.state_dict()["momentum.fc1.weight"], saved["momentum.fc1.weight"])
    state.undo()
    assert same(state.state_dict(), saved)


@by_codec
def test_job_that_goes_back_to_before_a_worker_leaves_it_nothing(codec: str) -> None:
    state = on_host(codec)
    push(state, gradients(0))
    state.commit()
    state.go_back({})
    assert same(state.state_dict(), on_host(codec).state_dict())


def test_residuals_are_read_from_a_state_with_other_settings_of_the_same_variables() -> None:
    saved, other = on_host("topk:0.05", momentum=0.9), on_host("onebit:64")
    push(saved, gradients(0))
    found, residuals = other.residuals_in(saved.state_dict()), saved.residuals()
    assert found.keys() == residuals.keys() == {0, 2}
    assert all(np.array_equal(found[index], residuals[index]) for index in found)
    with pytest.raises(UnknownVariable):
        on_host("fc1*=onebit *=none").residuals_in(saved.state_dict())
