"""What compression has not sent yet is reported while a worker lives, and is nobody's loss when it leaves well."""

from __future__ import annotations

import pytest
import torch

from tests.support.alone import Connect

pytestmark = pytest.mark.usefixtures("alone")


def test_residual_is_reported_at_the_first_push_and_now_and_then_and_none_is_left_behind(connect: Connect) -> None:
    settings = {"job.compression.push": "topk:0.1", "job.compression.whole_elements_max": 0}
    job = connect(settings=settings)
    model = torch.nn.Linear(40, 40)
    generator = torch.Generator().manual_seed(1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    training, progress = job._loop.trainer, job._session.progress
    assert training is not None
    assert training.pushes.feedback is not None
    reported = []
    for _ in range(66):
        optimizer.zero_grad()
        model(torch.randn(3, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        if not reported or progress.residual_norm != reported[-1]:
            assert progress.residual_norm == training.pushes.feedback.lost_norm > 0
            reported.append(progress.residual_norm)
    assert len(reported) == 2, "at the first of each 64 pushes"
    job.close()
    assert progress.residual_norm == 0.0
