"""The torch optimizer of each kind that servers have."""

from __future__ import annotations

from typing import Final

import torch

from shardyard_worker.optimizers import extra

TORCH: Final = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lamb": extra.LAMB,
    "lion": extra.Lion,
    "ftrl": extra.FTRL,
}
