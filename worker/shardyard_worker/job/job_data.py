"""How a training script reads data in a job, and how many steps the data makes. Must not know: models, optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.dataset import IndexReader
from shardyard_worker.data.feed import FeedSettings
from shardyard_worker.data.given_data import BATCH_SIZE, DataArguments, reader_of, steps_of
from shardyard_worker.data.loader_processes import Collate
from shardyard_worker.data.look_ahead import LookAhead
from shardyard_worker.job.batches import announce, open_batches
from shardyard_worker.job.membership import JobMember
from shardyard_worker.job.sampler import JobSampler

B = TypeVar("B")


class JobData(JobMember):
    """What a worker has of a job to read data with. `Job` adds models and optimizers."""

    def batches(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        accumulate: int = 1,
        look_ahead: LookAhead | None = None,
    ) -> Iterator[Any]:
        """Yields batches of the data. Each sample counts once an epoch over all workers, even if processes die.

        `data`: a dataset with `__len__` and `__getitem__`, or a torch DataLoader over one. A DataLoader says by itself
        how its data is read: batch_size, shuffle, drop_last, collate_fn, num_workers, pin_memory, prefetch_factor,
        timeout, worker_init_fn and multiprocessing_context are taken from it, and then not given here. Its generator is
        not used. Without a DataLoader, batch_size is 32, shuffle True, drop_last False and num_workers 0 unless given.

        With `num_workers`, that many processes read batches ahead, `prefetch_factor` (2) each; without, this process
        reads a batch when it is due. The batches and their random numbers are the same either way.

        Tensors are on `job.device`. `batch_size` is for one worker (asynchronous) or one logical rank (synchronous), in
        samples. Call `optimizer.step()` once for each batch. With `accumulate`, call it where `job.step_due` is true:
        once for `accumulate` batches, whose gradients are one push. `look_ahead(batch)` returns the ids that the
        modules of tables will look up, for example `{model.words: batch[0]}`; each step then fetches the next batch's
        rows too.

        Ends when all samples are counted. If you `break`, the unread batches go to other workers. All workers must make
        the same calls in the same order. Raises UnseekableDataset, FeedConflict, InvalidRequest, JobFailed.

        >>> model = torch.nn.Linear(1, 1)
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0).view(6, 1), torch.zeros(6, 1))
        >>> with sy.connect() as job:
        ...     model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        ...     for x, y in job.batches(data, batch_size=2, epochs=2, accumulate=3):
        ...         torch.nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        ...         if job.step_due:
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...     job.step
        2
        """
        given = DataArguments(batch_size, shuffle, drop_last, collate_fn, num_workers, pin_memory, prefetch_factor)
        reader, given = reader_of(data, given, self.device)
        settings = given.feed_settings(epochs=epochs, accumulate=accumulate)
        return open_batches(self._loop, reader, settings, look_ahead)

    def look_ahead(self, batches: Iterable[B], ids_of: LookAhead, *, accumulate: int = 1) -> Iterator[B]:
        """Yields a script's own batches, read one step ahead, so that each step fetches the next batch's rows too.

        `ids_of(batch)`: as `look_ahead` in job.batches. `accumulate`: the number of batches in a step. Raises
        InvalidRequest.
        """
        return announce(self._loop, batches, ids_of, accumulate)

    def sampler(
        self, dataset: Dataset[Any], *, batch_size: int = BATCH_SIZE, shuffle: bool = True, drop_last: bool = False
    ) -> JobSampler:
        """Returns a torch Sampler of lists of indices, for a DataLoader that the script goes through by itself:
        `DataLoader(dataset, batch_sampler=job.sampler(dataset, batch_size=32), num_workers=4)`.

        Each pass over the loader is one epoch, in which each sample counts once over all workers, even if processes
        die. Call `optimizer.step()` once for each batch. Arguments are as in job.batches. All workers must make as many
        passes. With num_workers, an epoch may end with a batch that repeats the last one and does not count. In a job
        of local steps use job.batches(loader). Raises UnseekableDataset, InvalidRequest.

        >>> model = torch.nn.Linear(1, 1)
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0).view(6, 1), torch.zeros(6, 1))
        >>> with sy.connect() as job:
        ...     model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        ...     loader = torch.utils.data.DataLoader(data, batch_sampler=job.sampler(data, batch_size=2))
        ...     for epoch in range(2):
        ...         for x, y in loader:
        ...             optimizer.zero_grad()
        ...             torch.nn.functional.mse_loss(model(x), y).backward()
        ...             optimizer.step()
        ...     job.step
        6
        """
        if self._loop.is_local:
            raise InvalidRequest(
                "job.sampler in a job of local steps",
                why="a round has several batches, of which a loader may deliver some that do not count",
                todo="use job.batches(loader), which reads in the loader's processes too",
            )
        settings = FeedSettings(batch_size, 1, shuffle, drop_last)
        return JobSampler(self._loop, IndexReader(dataset, self.device), settings)

    @property
    def step_due(self) -> bool:
        """Whether to call `optimizer.step()` after the current batch. With `accumulate` only the last batch of each
        push is due. Always true without `accumulate`."""
        feed = self._loop.feed
        return feed is None or feed.work is None or feed.work.due

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the block: backward sends none of them while it computes, since a later backward
        adds to them before `optimizer.step()`. Without `worker.exchange: overlapped` backward sends none in any case.
        job.batches' `accumulate` does this by itself."""
        trainer = self._loop.need_trainer()
        before, trainer.accumulates_by_hand = trainer.accumulates_by_hand, True
        try:
            yield
        finally:
            trainer.accumulates_by_hand = before

    def steps_total(
        self,
        data: Dataset[Any] | DataLoader[Any] | int,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        drop_last: bool | None = None,
        accumulate: int = 1,
    ) -> int:
        """Returns by how many steps `job.step` grows while all workers go through the data with job.batches or
        job.sampler, given the same arguments: for schedulers, for example as `T_max`. Call it before `prepare` or
        later.

        `data`: a dataset, a DataLoader (then without batch_size and drop_last), or a number of samples. Synchronous:
        a step has a batch of each logical rank, so the number does not change when workers come and go. Asynchronous:
        each batch is a step, whichever worker computes it. In local mode steps of a logical rank count. Batches that do
        not count (quarantine, backup workers) change the number. Raises InvalidRequest.

        >>> with sy.connect(settings={"job.consistency.mode": "sync", "job.consistency.logical_ranks": 2}) as job:
        ...     job.steps_total(1000, batch_size=25, epochs=3)
        60
        """
        given = DataArguments(batch_size=batch_size, drop_last=drop_last)
        return steps_of(data, given, self._session.logical_ranks, epochs=epochs, accumulate=accumulate)
