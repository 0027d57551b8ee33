"""How far a job is in its data: epoch, percent, and the time that is left.

Invariant: what cannot be known is left out. A job that reads data of its own has no progress; a job that stands, goes
back to a checkpoint or was told to stop has no time left. Must not know: how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.quantities import describe_duration

LEFT_S_MAX: Final = 365 * 24 * 3_600
"""A longer time says only that the rate is that of a job that stands."""


@dataclass(frozen=True)
class DataProgress:
    """In the data set that the job reads, the newest one; `feed` is its number. `fraction`: of all its epochs, from 0
    to 1. `left_s`: None if it is not known. `is_pass`: each data set so far was of one epoch, as each pass of
    `job.sampler` is, and nobody knows how many follow."""

    feed: int
    epoch: int
    epochs: int
    fraction: float
    left_s: float | None
    is_pass: bool

    def __str__(self) -> str:
        """For example `epoch 3 of 10, 27%, 4 min 3 s left`, `data set 2: epoch 1 of 4, 40%`, or `pass 3: 40%`."""
        if self.is_pass:
            said = f"pass {self.feed + 1:,}: "
        else:
            said = "" if self.feed == 0 else f"data set {self.feed + 1}: "
            said += f"epoch {self.epoch:,} of {self.epochs:,}, "
        # rounded down: 100% is all of it
        said += f"{int(100 * self.fraction)}%"
        return said if self.left_s is None else f"{said}, {describe_duration(1_000 * ceil(self.left_s))} left"


def data_progress(job: wire.JobStatus) -> DataProgress | None:
    """None for a job that does not run, or of which nothing is known: it has opened no data set."""
    if job.state not in (wire.JOB_STATE_RUNNING, wire.JOB_STATE_FINISHING) or not job.feeds:
        return None
    feed = next((each for each in job.feeds if not each.finished), job.feeds[-1])
    units = feed.free + feed.leased + feed.done
    samples = feed.samples * feed.epochs
    if not units or not samples:
        return None
    # samples are finer than data shards, and count what is computed again twice; data shards bound them
    former = sum(each.samples * each.epochs for each in job.feeds if each.feed < feed.feed)
    least, most = feed.done / units, (feed.done + feed.leased) / units
    known = job.feeds[0].feed == 0
    fraction = min(max((job.samples - former) / samples, least), most) if known else least
    epoch = min(int(fraction * feed.epochs) + 1, feed.epochs)
    left_s = _left_s(job, (1 - fraction) * samples)
    is_pass = all(each.epochs == 1 for each in job.feeds if each.feed <= feed.feed)
    return DataProgress(feed.feed, epoch, feed.epochs, fraction, left_s, is_pass)


def _left_s(job: wire.JobStatus, samples: float) -> float | None:
    stands = job.recovering or job.waits or job.HasField("stop") or job.state != wire.JOB_STATE_RUNNING
    if stands or not samples or not job.samples_per_s:
        return None
    left_s = samples / job.samples_per_s
    return left_s if left_s <= LEFT_S_MAX else None
