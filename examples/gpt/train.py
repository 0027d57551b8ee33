"""A small GPT, trained on the sources of Python's standard library, byte by byte.

python examples/gpt/train.py                                              alone, in this process
shardyard run -c configs/gpt.yaml examples/gpt/train.py                   in a yard of its own, two workers
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/gpt/train.py         in a running yard
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import GPT, Shape, decay_groups, generate
from passages import cut, read, sources
from torch.utils.data import TensorDataset

import shardyard as sy

TELL_EVERY_S = 5.0
TESTED_AT_ONCE = 64
LEAST_RATE = 0.1


def warm_cosine(step: int, *, warm_up: int, total: int) -> float:
    """The share of the learning rate at a step: it rises linearly for `warm_up` steps, then falls to LEAST_RATE along
    half a cosine (Loshchilov and Hutter, SGDR, ICLR 2017, without restarts)."""
    if step < warm_up:
        return (step + 1) / warm_up
    passed = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * passed)) / 2


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the bytes that come next, in nats. Shapes (n, block, vocabulary) and (n, block) in."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def bits_per_byte(model: torch.nn.Module, passages: torch.Tensor) -> float:
    """The mean cross-entropy over all passages, in bits. Nothing is learned from them."""
    model.eval()
    with torch.no_grad():
        parts = [passages[begin : begin + TESTED_AT_ONCE].long() for begin in range(0, len(passages), TESTED_AT_ONCE)]
        nats = math.fsum(loss_of(model(part[:, :-1]), part[:, 1:]).item() * len(part) for part in parts)
    return nats / len(passages) / math.log(2)


def sample(model: torch.nn.Module, options: argparse.Namespace, seed: int) -> str:
    """The prompt and how the model continues it. The same model and seed give the same text."""
    model.eval()
    text = generate(
        model,
        options.prompt.encode(),
        count=options.sample,
        block=options.block,
        temperature=options.temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    return text.decode(errors="replace")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="HOST:PORT of a running yard")
    parser.add_argument("--config", help="a YAML file, see docs/reference/configuration.md")
    parser.add_argument("--job", default=os.environ.get("SHARDYARD_JOB", "gpt"), help="the job's name")
    parser.add_argument("--seed", type=int, help="the job's seed")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--heads", type=int, default=4, help="of each layer's attention; a divisor of the width")
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--block", type=int, default=128, help="length of a passage, in bytes")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--files", type=Path, nargs="+", help="texts to read in place of the sources of the standard library"
    )
    data.add_argument("--passages", type=int, default=8_000, help="to learn from, at most, spread over the files")
    data.add_argument("--held-out", type=int, default=256, help="passages to test on, at most")
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=1)
    training.add_argument("--batch-size", type=int, default=4, help="passages")
    training.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one update")
    training.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate, for AdamW")
    training.add_argument("--warm-up", type=float, default=0.1, help="share of the steps in which the rate rises")
    training.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    training.add_argument(
        "--clip", type=float, help="the largest norm of a gradient (job.clip.norm); default: the configuration's"
    )
    training.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    text = parser.add_argument_group("text that is generated at the end")
    text.add_argument("--prompt", default="def ", help="its beginning")
    text.add_argument("--sample", type=int, default=400, help="bytes to generate")
    text.add_argument("--temperature", type=float, default=0.8, help="above 0; below 1: likely bytes more often")
    options = parser.parse_args()
    if options.width % (2 * options.heads):
        parser.error(f"--heads: each head needs an even width, and {options.width} / {options.heads} is not one")
    if not options.prompt:
        parser.error("--prompt: at least one character")
    if options.temperature <= 0:
        parser.error("--temperature: above 0")
    return options


def main() -> None:
    options = parse()
    given = {"job.seed": options.seed, "job.clip.norm": options.clip}
    settings = {name: value for name, value in given.items() if value is not None}
    shape = Shape(options.layers, options.heads, options.width, options.block)
    train, held_out = cut(read(options.files or sources()), shape.block, options.passages, options.held_out)
    loop = {"batch_size": options.batch_size, "epochs": options.epochs, "accumulate": options.accumulate}
    with sy.connect(options.coordinator, config=options.config, job=options.job, settings=settings) as job:
        model = GPT(shape).to(job.device)
        optimizer = torch.optim.AdamW(decay_groups(model, options.decay), lr=options.lr, betas=(0.9, 0.95))
        total = job.steps_total(len(train), drop_last=True, **loop)
        warm_up = max(1, round(options.warm_up * total))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warm_cosine(step, warm_up=warm_up, total=total)
        )
        model, optimizer, scheduler = job.prepare(model, optimizer, scheduler, loss=loss_of)
        if job.chief:
            size = sum(parameter.numel() for parameter in model.parameters())
            print(f"{size:,} parameters, {len(train):,} passages of {shape.block} bytes, {total:,} steps", flush=True)
        autocast = torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=options.bf16)
        told, learned = time.monotonic(), 0
        for (passages,) in job.batches(TensorDataset(train), drop_last=True, **loop):
            tokens = passages.long()
            with autocast:
                loss = job.train_step(tokens[:, :-1], tokens[:, 1:])
            learned += len(passages)
            if job.step_due:
                job.log(loss=loss)
            if job.chief and (passed := time.monotonic() - told) >= TELL_EVERY_S:
                speed = learned * shape.block / passed
                print(f"step {job.step:,}: loss {loss.item():.3f}, {speed:,.0f} bytes/s in this worker", flush=True)
                told, learned = time.monotonic(), 0

        if job.chief:
            with autocast:
                bits = bits_per_byte(model, held_out.to(job.device))
                text = sample(model, options, job.seed)
            print(f"{bits:.3f} bits per byte of {len(held_out):,} held-out passages after {job.step:,} steps")
            print(f"a sample of {options.sample} bytes, temperature {options.temperature}:")
            print(text, flush=True)


if __name__ == "__main__":
    main()
