"""Learns which items users click: two towers over embeddings of users and items."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

USERS, ITEMS, WIDTH = 60, 40, 8


class Tower(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.rows = torch.nn.Embedding(count, WIDTH)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, WIDTH))

    def forward(self, ids):
        return self.mlp(self.rows(ids))


class TwoTowers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)

    def forward(self, users, items):
        return (self.user(users) * self.item(items)).sum(1)


def clicks():
    """A user clicks an item if both numbers are even, or both are odd."""
    drawn = torch.Generator().manual_seed(5)
    users, items = (torch.randint(count, (480,), generator=drawn) for count in (USERS, ITEMS))
    return TensorDataset(users, items, (users % 2 == items % 2).float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=24)
    options = parser.parse_args()
    dataset = clicks()
    loader = DataLoader(dataset, batch_size=options.batch_size)
    torch.manual_seed(1)
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        total = 0.0
        for users, items, clicked in loader:
            loss = F.binary_cross_entropy_with_logits(model(users, items), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)
    torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
