"""The scale of a job's losses: the same as torch's, one for all workers, whoever proposes first."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer
from shardyard_worker.optimizers.grad_scaler import COUNT_MAX, JobScaler, ScaleCounts, ScaleRule, counts_of, unscaler


def rule(initial: float = 65_536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 3) -> ScaleRule:
    return ScaleRule(initial=initial, growth=growth, backoff=backoff, interval=interval)


def scaler(*, by_steps: bool = True, init_scale: float = 4.0, interval: int = 3, enabled: bool = True) -> JobScaler:
    return JobScaler(
        torch.device("cpu"),
        init_scale=init_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=interval,
        enabled=enabled,
        by_steps=by_steps,
    )


@pytest.mark.parametrize(
    ("initial", "growth", "backoff", "interval"),
    [(65_536.0, 2.0, 0.5, 4), (1.0, 4.0, 0.25, 1), (2.0**127, 2.0, 0.5, 2), (3.0, 1.5, 0.75, 3)],
)
def test_scale_after_any_steps_is_torchs(initial: float, growth: float, backoff: float, interval: int) -> None:
    mine, counts = rule(initial, growth, backoff, interval), ScaleCounts()
    theirs, tracker = torch.full((), initial), torch.zeros((), dtype=torch.int32)
    rng = random.Random(5)
    for _ in range(400):
        overflow = rng.random() < 0.2
        counts = mine.after(counts, overflow=overflow)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflow)), growth, backoff, interval)
        assert counts.steps == tracker.item()
        expected = theirs.item()
        is_exact = growth in (2.0, 4.0)
        assert mine.scale(counts) == (expected if is_exact else pytest.approx(expected, rel=1e-4)), counts


def test_counts_are_one_number_and_that_of_who_overflowed_is_the_largest() -> None:
    rng = random.Random(6)
    made = rule(interval=1_000)
    for _ in range(300):
        counts = ScaleCounts(rng.randrange(COUNT_MAX), rng.randrange(COUNT_MAX), rng.randrange(1_000))
        assert counts_of(counts.number) == counts
        assert counts.number < 2**63
        fine, over = made.after(counts, overflow=False), made.after(counts, overflow=True)
        assert over.number > max(fine.number, counts.number)
        assert fine.number > counts.number


def test_more_overflows_than_can_be_counted_are_an_error() -> None:
    with pytest.raises(InvalidRequest, match="overflows"):
        rule().after(ScaleCounts(COUNT_MAX), overflow=True)


@pytest.mark.parametrize(
    "wrong", [{"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}, {"interval": 0}, {"initial": 0.0}]
)
def test_rule_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="scaler"):
        rule(**wrong)  # type: ignore[arg-type]


class Kept(torch.optim.SGD):
    """Keeps what it was told."""

    _step_supports_amp_scaling = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.told = bool(self.found_inf), self.grad_scale  # type: ignore[attr-defined]


def take(mine: JobScaler, gradient: float) -> Kept:
    """A step whose gradient is that."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Kept([weight], lr=1.0)
    mine.scale((weight * gradient).sum()).backward()
    mine.step(optimizer)
    mine.state.copy_(mine.proposal(optimizer.told[0]))
    mine.update()
    optimizer.gradient = weight.grad  # type: ignore[attr-defined]
    return optimizer


def test_steps_give_unscaled_gradients_and_the_scale_of_the_counts() -> None:
    mine = scaler()
    scales = []
    for gradient in (1.0, 2.0, 3.0, float("inf"), 1.0):
        scales.append(mine.get_scale())
        optimizer = take(mine, gradient)
        assert optimizer.told == (gradient == float("inf"), None), "unscaled already"
        if gradient != float("inf"):
            assert optimizer.gradient.tolist() == [gradient] * 3  # type: ignore[attr-defined]
    assert scales == [4.0, 4.0, 4.0, 8.0, 4.0]
    assert mine.state_dict() == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 1,
    }


def test_scale_does_not_change_while_gradients_are_accumulated() -> None:
    mine = scaler()
    first = mine.scale(torch.ones(()))
    mine.state.fill_(ScaleCounts(1).number)
    assert mine.scale(torch.ones(())).item() == first.item() == 4.0
    mine._begun = False
    assert mine.scale(torch.ones(())).item() == 2.0


def test_asynchronous_an_overflow_is_not_forgotten_for_another_workers_older_counts() -> None:
    mine, other = scaler(by_steps=False), scaler(by_steps=False)
    mine.state.copy_(mine.proposal(True))
    mine.state.copy_(other.proposal(False))  # which has not heard of it
    assert mine.get_scale() == 2.0
    other.state.copy_(mine.proposal(False))
    assert other.get_scale() == 2.0


def test_synchronous_the_counts_are_those_of_the_version_also_where_the_job_went_back() -> None:
    mine = scaler()
    mine.proposal(True)
    assert mine.get_scale() == 4.0


def test_what_would_give_this_worker_a_scale_of_its_own_is_refused() -> None:
    mine = scaler()
    for change in (
        lambda: mine.update(3.0),
        lambda: mine.set_growth_factor(3.0),
        lambda: mine.set_backoff_factor(0.1),
        lambda: mine.set_growth_interval(7),
    ):
        with pytest.raises(InvalidRequest):
            change()
    with pytest.raises(UnsupportedOptimizer):
        mine.load_state_dict({})


def test_step_twice_and_update_without_a_step_are_torchs_errors() -> None:
    mine = scaler()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Kept([weight], lr=1.0)
    with pytest.raises(AssertionError, match="_scale is None"):
        mine.update()
    mine.scale(weight.sum()).backward()
    mine.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        mine.step(optimizer)


def test_disabled_it_does_nothing() -> None:
    mine = scaler(enabled=False)
    assert mine.scale(torch.ones(())).item() == 1.0
    mine.update()
    assert mine.get_scale() == 1.0


def test_unscaling_changes_wide_gradients_in_place_and_widens_narrow_ones() -> None:
    wide, narrow = torch.full((3,), 8.0), torch.full((3,), 2.0**-24, dtype=torch.float16)
    before = wide.data_ptr()
    unscale = unscaler(torch.tensor(4.0), [wide, None, narrow])
    assert unscale(None) is None
    assert unscale(wide) is wide
    assert wide.data_ptr() == before
    assert wide.tolist() == [2.0] * 3
    made = unscale(narrow)
    assert made is not None
    assert made.dtype is torch.float32
    assert made.tolist() == [2.0**-26] * 3, "in float16 it would be zero"
    unscaled = torch.ones(2)
    assert unscaler(None, [unscaled])(unscaled) is unscaled


def test_scale_below_one_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = scaler(init_scale=1.0)
    with caplog.at_level("WARNING"), warnings.catch_warnings():
        for _ in range(3):
            take(mine, float("nan"))
    assert ["the loss scale is" in record.message for record in caplog.records] == [True]
