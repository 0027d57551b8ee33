"""The job and the step in the lines of a process's log are those of the job that it is in."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from shardyard.runtime.log import current_fields
from tests.support.alone import Connect


class _Fields(logging.Handler):
    """The fields of each line, at the moment in which it is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, object]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.getMessage(), current_fields()))


@pytest.fixture
def fields() -> Iterator[_Fields]:
    log, handler = logging.getLogger("shardyard.worker"), _Fields()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_new_job_in_the_same_process_begins_without_the_step_of_the_one_before(
    connect: Connect, fields: _Fields
) -> None:
    """As in a notebook, whose first job was left, or was not."""
    for name, leaves in (("first", False), ("second", True), ("third", True)):
        job = connect(settings={"job.name": name})
        ((_, said),) = [each for each in fields.found if each[0] == f"started job {name!r}"]
        assert (said["job"], "step" in said) == (name, False)
        job.register({"w": torch.zeros(1)})
        job.push({"w": torch.ones(1)})
        assert current_fields()["step"] == 1
        if leaves:
            job.close()
            assert not {"job", "step"} & current_fields().keys()
