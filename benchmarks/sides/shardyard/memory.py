"""What a worker takes of its machine's memory, phase by phase: a training script, as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.memory import BATCH, CHECKPOINT_STEPS, STEPS

PARTS = ("VmRSS", "VmHWM", "RssShmem")


def status_bytes() -> dict[str, int]:
    """Resident memory of this process, its peak since `forget_peak`, and what of it is shared memory, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if name in PARTS}
    return {name: int(kib) * 1024 for name, kib in found.items()}


class Phases:
    """The peak of each phase, and what was resident at its end, beyond what the process had before its model."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self._forget_peak()
        self._base = status_bytes()

    def end(self, phase: str) -> None:
        now = status_bytes()
        got = {name: now[name] - (0 if name == "RssShmem" else self._base["VmRSS"]) for name in PARTS}
        before = self.found.get(phase, got)
        self.found[phase] = {**got, "VmHWM": max(got["VmHWM"], before["VmHWM"])}
        self._forget_peak()

    def _forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def phases_of(options: Any) -> Mapping[str, Any]:
    settings = {**options.settings, "worker.threads": 1}
    with sy.connect(job="memory", settings=settings) as job:
        torch.ones(8, requires_grad=True).sum().backward()  # torch's own threads
        width, layers = options.width, options.layers
        inputs = torch.randn(BATCH * STEPS * options.ranks, width)
        data = torch.utils.data.TensorDataset(inputs, inputs.flip(1).contiguous())
        phases = Phases()
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        model = torch.nn.Sequential(*parts[:-1])
        phases.end("builds its model")
        job.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss=F.mse_loss)
        phases.end("prepares")
        step = 0
        for x, y in job.batches(data, batch_size=BATCH, epochs=1):
            job.train_step(x, y)
            step += 1
            # the first batch compiles, and loads modules of torch; a checkpoint is due from step CHECKPOINT_STEPS on
            phases.end("begins" if step == 1 else "trains" if step < CHECKPOINT_STEPS else "publishes")
        phases.end("ends")
        loss = float(F.mse_loss(model(inputs[:BATCH]), data.tensors[1][:BATCH]))
    return {"phases": phases.found, "loss": loss, "steps": step}


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args()
    conversation.answer({"train": lambda: phases_of(options)})


if __name__ == "__main__":
    main()
