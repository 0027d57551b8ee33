"""Which device a training process uses."""

from __future__ import annotations

import torch

from shardyard.domain.errors import ConfigurationError


def pick_device(wanted: str, local_index: int) -> torch.device:
    """Picks the device for worker.device = `wanted`. "auto": the machine's GPUs in turn, one for each process, or the
    CPU if there is none. Several: in turn. `local_index`: this process's index on its machine. Raises
    ConfigurationError.

    >>> pick_device("cpu cpu", 1)
    device(type='cpu')
    """
    several = wanted.split()
    wanted = several[local_index % len(several)]
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(f"worker.device is {wanted!r}; torch sees no CUDA device here")
    if wanted in ("auto", "cuda"):
        wanted = f"cuda:{local_index % torch.cuda.device_count()}"
    device = torch.device(wanted)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"worker.device is {wanted!r}; torch sees {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(device)
    return device
