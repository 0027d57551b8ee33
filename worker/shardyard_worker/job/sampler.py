"""`job.sampler`: lists of indices for a DataLoader that the script goes through by itself.

The loader pulls lists ahead of the batch that it delivers, so work is promised before its turn. The feed has one piece
of work at a time; a step counts if the batch at hand is that work. If the feed goes on with other work than was
promised (a rank has moved, a lease was lost, a batch is in quarantine, the job went back), what was promised is still
read and computed, and dropped, until the loader delivers the work that is due.

The loader asks for the next list before it delivers a batch. With the batch that is this worker's last for now, work
may still come here: from other workers, when they die, or when servers go back to a checkpoint. As long as a batch of
this worker is not pushed it cannot wait for that, since others may wait for it. So it then gives the last list once
more, as a batch that does not count.

Owns: which list the batch at hand has. Invariant: a batch counts under the name of its own work, or not at all. Must
not know: how a feed gets its work, tensors.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from torch.utils.data import Sampler

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import Feed, FeedSettings
from shardyard_worker.data.loader_processes import Reading, Seed
from shardyard_worker.job.batches import open_batches
from shardyard_worker.job.training_loop import TrainingLoop

log = logging.getLogger("shardyard.worker")


class JobSampler(Sampler[list[int]]):
    """What `job.sampler` returns. Give it to a DataLoader as `batch_sampler`. Each pass over the loader is one
    epoch."""

    def __init__(self, loop: TrainingLoop, reader: Reader, settings: FeedSettings) -> None:
        """Raises InvalidRequest."""
        settings.check(in_order=reader.in_order)
        self._loop = loop
        self._reader = reader
        self._settings = settings
        self._epoch: SampledEpoch | None = None

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        if epoch is None or not epoch.is_untouched:
            if epoch is not None:
                epoch.close()
            epoch = self._epoch = SampledEpoch(
                self._loop, lambda: open_batches(self._loop, self._reader, self._settings, None)
            )
        # else a loader that was only looked into, as by next(iter(loader))
        return epoch.begin()

    def __len__(self) -> int:
        """About how many batches this worker computes in an epoch: its equal share."""
        session, settings = self._loop.session, self._settings
        ranks = session.logical_ranks or 1
        plan = EpochPlan(self._reader.samples, settings.batch_size, ranks, settings.drop_last)
        return -(-plan.steps_per_epoch * ranks // session.world_size)


class _Pulls(Iterator[list[int]]):
    """What a loader pulls lists from. Not a generator: that there is no list now does not mean that there will be
    none."""

    def __init__(self, pull: Callable[[], list[int]]) -> None:
        self._pull = pull

    def __next__(self) -> list[int]:
        return self._pull()


class SampledEpoch:
    """One pass over a loader. For the thread that trains."""

    def __init__(self, loop: TrainingLoop, open_works: Callable[[], Iterator[list[int]]]) -> None:
        """`open_works` returns the lists of the feed's works, each when it is due."""
        self._loop = loop
        self._open_works = open_works
        self._works: Iterator[list[int]] | None = None
        self._due: Reading | None = None
        """The feed's current work."""
        self._ended = False
        self._at = -1
        """The number of the list on which the last step was taken."""
        self._left: weakref.ref[_Pulls] | None = None
        self._warned = False
        self._forget_pulls()

    def _forget_pulls(self) -> None:
        self._promised: deque[Seed | None] = deque()
        """The lists that the loader has got, from number `_passed` on. None: one that does not count."""
        self._passed = 0
        self._pulls = 0
        self._before_first: int | None = None
        """How often the loader has asked before it delivered its first batch; from then on it asks once a batch.
        Known with the first step."""
        self._has_more = True
        """Whether the last pull got a list."""
        self._latest: list[int] = []
        self._coming: Iterator[Reading] = iter(())
        """The works that are expected after those that were promised."""

    @property
    def is_untouched(self) -> bool:
        """Whether no step was taken in it."""
        return self._at < 0 and not self._ended

    @property
    def is_left(self) -> bool:
        """Whether nobody can pull from it any more."""
        return self._left is not None and self._left() is None

    def begin(self) -> Iterator[list[int]]:
        """Another loader, or the same one again, begins to pull."""
        self._forget_pulls()
        if self._due is not None:
            self._coming = chain([self._due], self._feed.following())
        pulls = _Pulls(self._pull)
        self._left = weakref.ref(pulls)
        return pulls

    def close(self) -> None:
        """The script goes through no more batches. Unread ones go to other workers."""
        self._ended = True
        if self._works is not None:
            self._works.close()  # type: ignore[attr-defined]
        if self._loop.sampled is self:
            self._loop.sampled = None

    # ---- the loader

    def _pull(self) -> list[int]:
        """The next list. Raises StopIteration if there is none now."""
        self._pulls += 1
        self._has_more = False
        if self._works is None and not self._ended:
            self._start()
        elif self._before_first is not None:
            self._pass_over(self._pulls - self._before_first - 1)
        if self._ended:
            raise StopIteration
        reading = next(self._coming, None)
        if reading is None and not self._owes:
            self._advance()
            if self._ended:
                raise StopIteration
            reading = next(self._coming, None)
        if reading is not None:
            self._latest = reading.indices
        elif not self._must_go_on:
            raise StopIteration
        self._has_more = True
        self._promised.append(None if reading is None else reading.seed)
        self._prepare_backward()
        return self._latest

    def _start(self) -> None:
        loop = self._loop
        if loop.sampled is not None and loop.sampled is not self:
            loop.sampled.close()
        self._works = self._open_works()
        loop.sampled = self
        self._advance()

    @property
    def _feed(self) -> Feed:
        assert self._loop.feed is not None
        return self._loop.feed

    @property
    def _is_taken(self) -> bool:
        """Whether the current work was pushed."""
        work = self._feed.work
        return work is None or work.taken

    @property
    def _owes(self) -> bool:
        """Whether a list was promised whose work is not pushed."""
        done = self._due.seed if self._due is not None and self._is_taken else None
        return any(seed is not None and seed != done for seed in self._promised)

    @property
    def _must_go_on(self) -> bool:
        """Whether the loader must be kept going with a list that does not count: it delivers all that it has, and work
        may come to this worker yet."""
        if self._loop.session.is_alone:
            return False
        if self._before_first is None:
            return len(self._promised) == 1
        return self._passed + len(self._promised) == self._pulls - self._before_first

    def _advance(self) -> None:
        """Goes on to the feed's next work, once there is one. What was due and not pushed does not count."""
        assert self._works is not None
        indices = next(self._works, None)
        if indices is None:
            self._ended, self._due = True, None
            return
        seed = self._feed.seed
        assert seed is not None
        self._due = Reading(seed, indices)
        self._align()

    def _align(self) -> None:
        """If the work that is due was not promised, promises it next."""
        assert self._due is not None
        if self._due.seed not in self._promised:
            self._coming = chain([self._due], self._feed.following())

    def _pass_over(self, number: int) -> bool:
        """The batches before this list are over. Returns whether the feed has gone on."""
        has_advanced = False
        while self._passed < number and self._promised:
            seed = self._promised.popleft()
            self._passed += 1
            if self._due is not None and seed == self._due.seed:
                self._advance()
                has_advanced = True
        return has_advanced

    def _prepare_backward(self) -> None:
        """No gradient of a batch that does not count is sent while backward computes it."""
        if self._before_first is not None and self._loop.trainer is not None:
            due = None if self._due is None else self._due.seed
            self._loop.trainer.accumulates = self._promised[0] != due

    # ---- the step

    def takes_step(self) -> bool:
        """A step follows. Returns whether the batch at hand counts. Raises InvalidRequest."""
        if self._before_first is None:
            self._before_first = self._pulls - 1
        number = self._pulls - self._before_first - 1
        if number <= self._at and not self._has_more:
            number = self._at + 1  # something reads ahead of the script, and has read the last batch
        if number <= self._at or number >= self._passed + len(self._promised):
            if self._ended:
                self.close()
                return True  # of the script's own data
            raise InvalidRequest(
                "optimizer.step() twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call optimizer.step() once for each batch of the loader; job.batches(accumulate=...) has several"
                " batches in a step",
            )
        self._at = number
        step = self._loop.step
        has_advanced = self._pass_over(number)
        if self._due is None or self._promised[0] != self._due.seed or self._is_taken:
            self._drop()
            return False
        if has_advanced and self._loop.session.mode is UpdateMode.SYNC and self._loop.step != step:
            # the batch was computed on values of another step
            self._promised[0] = None
            self._align()
            self._drop()
            return False
        return True

    def _drop(self) -> None:
        if self._promised[0] is not None and not self._warned:
            self._warned = True
            log.warning(
                "a batch of the loader was read for work that this worker does not have any more; it is computed, and"
                " does not count"
            )

    def stepped(self) -> None:
        """The step was taken. If the loader gets no more lists, waits for the end of the data."""
        last = self._passed + len(self._promised) - 1
        if self._ended or self._has_more or self._at < last or not self._is_taken:
            return
        self._advance()
        if not self._ended:
            raise InvalidRequest(
                "the job has work for this worker again, after the loader has ended",
                why="servers went back to a checkpoint, or another worker has left",
                todo="start the script again: the job goes on where it stands. job.batches(loader) needs no restart",
            )
