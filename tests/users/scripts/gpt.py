"""Learns to continue periodic texts: a small GPT with AdamW, a cosine schedule, clipping, bf16 and accumulation."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH, WIDTH, EPOCHS = 16, 12, 32, 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.inputs(self.before_attention(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.outputs(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, text):
        x = self.words(text) + self.positions(torch.arange(text.shape[1]))
        return self.norm(self.blocks(x)) @ self.words.weight.T


def texts(count):
    """Text i counts upwards by a step of its own."""
    number = torch.arange(count)
    return (number[:, None] + (1 + number[:, None] % 3) * torch.arange(LENGTH + 1)) % WORDS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    dataset = TensorDataset(texts(256))
    loader = DataLoader(dataset, batch_size=options.batch_size)
    torch.manual_seed(1)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = EPOCHS * len(loader) // options.accumulate
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for epoch in range(EPOCHS):
        total = 0.0
        for number, (text,) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
                logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
            (loss / options.accumulate).backward()
            total += loss.item()
            if (number + 1) % options.accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}, rate {optimizer.param_groups[0]['lr']:.6f}", flush=True)
    torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
