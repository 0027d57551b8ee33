"""A line through points that lie in text files: each line of each file counts once an epoch.

python examples/files/train.py --folder /tmp/points                                      alone, in this process
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/files/train.py --folder /tmp/points    in a running yard
"""

import argparse
from pathlib import Path

import torch

import shardyard as sy

FILES, LINES = 5, 200


def write_points(folder: Path) -> None:
    """Files of lines "x,y", with y = 3 x - 1 and some noise; the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        x = torch.rand(LINES, generator=generator)
        y = 3 * x - 1 + 0.01 * torch.randn(LINES, generator=generator)
        lines = [f"{each:.6f},{value:.6f}\n" for each, value in zip(x.tolist(), y.tolist(), strict=True)]
        (folder / f"points-{number}.csv").write_text("".join(lines))


def point(line: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = map(float, line.split(b","))
    return torch.tensor([x]), torch.tensor([y])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("points"))
    options = parser.parse_args()
    if not options.folder.exists():
        write_points(options.folder)
    dataset = sy.TextLines(sorted(options.folder.glob("*.csv")), decode=point)
    with sy.connect() as job:
        model = torch.nn.Linear(1, 1).to(job.device)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
        for x, y in job.batches(dataset, batch_size=20, epochs=4):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
        if job.chief:
            slope, height = model.weight.item(), model.bias.item()
            print(f"{len(dataset)} points in {FILES} files: y = {slope:.2f} x {height:+.2f}")


if __name__ == "__main__":
    main()
