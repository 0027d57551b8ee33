"""Steps on data that a script reads by itself: how many samples they have, and whether all workers read the same.

Must not know: jobs, steps, how a push travels.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

log = logging.getLogger("shardyard.worker")


class ForwardSamples:
    """Counts the samples that a model's forwards have had: of each forward in training, the length of its first tensor
    argument."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._count = 0
        self._hook: RemovableHandle | None = None
        if not isinstance(model, torch.jit.ScriptModule):  # it takes no hooks
            self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def take(self) -> int:
        """The samples since the last call; 0 if no forward was seen, as in a model that is scripted, or was compiled
        afterwards."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note(self, model: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # a compiler would trace the count, and compile anew for each
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._count += _length((*given, *named.values())) or 0


def _length(given: Iterable[Any]) -> int | None:
    """The length of the first tensor among the values, and those within them."""
    for each in given:
        if isinstance(each, torch.Tensor):
            found = each.shape[0] if each.ndim else None
        elif isinstance(each, dict):
            found = _length(each.values())
        else:
            found = _length(each) if isinstance(each, list | tuple) else None
        if found is not None:
            return int(found)
    return None


class OwnData:
    """Looks once, at the first step on data of a script's own, whether a DataLoader is being read that all workers read
    alike."""

    def __init__(self) -> None:
        self.is_divided = False
        """Whether the script asks for its part of the data (`job.rank`)."""
        self._has_looked = False

    def look(self) -> None:
        """Warns if there is one."""
        if self._has_looked:
            return
        self._has_looked = True
        # what refers to the class of an iterator is an iterator, among others; some 0.02 s, where a look at all objects
        # takes twice as long
        iterators = _BaseDataLoaderIter.__subclasses__()
        if not self.is_divided and any(map(_reads_all, gc.get_referrers(*iterators))):
            log.warning(
                "the samples of a DataLoader are not leased: each worker reads all of them, so with several workers"
                " each counts several times an epoch. Change `for ... in loader:` to `for ... in job.batches(loader):`,"
                " which gives each sample to one worker; or read a part in each worker, by job.rank and job.world_size"
            )


def _reads_all(each: object) -> bool:
    if not issubclass(type(each), _BaseDataLoaderIter):  # isinstance asks proxies for their class
        return False
    sampler = getattr(each, "_index_sampler", None)
    return not isinstance(getattr(sampler, "sampler", sampler), DistributedSampler)
