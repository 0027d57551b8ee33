"""Learns four classes of synthetic images: a CNN, with a DataLoader of its own that reads in two processes."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Image i is noise that index i alone decides, with a bright stripe where its label says."""

    def __len__(self):
        return 192

    def __getitem__(self, index):
        image = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(index))
        image[:, 3 * (index % 4) : 3 * (index % 4) + 3] += 0.5
        return image, index % 4


def collate(samples):
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 8, 3)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.classifier = torch.nn.Linear(8 * 5 * 5, 4)

    def forward(self, images):
        features = F.max_pool2d(F.relu(self.norm(self.convolution(images))), 2)
        return self.classifier(features.flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--shuffle", action="store_true")
    options = parser.parse_args()
    dataset = Images()
    loader = DataLoader(
        dataset, batch_size=options.batch_size, shuffle=options.shuffle, num_workers=2, collate_fn=collate
    )
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(3):
        total = 0.0
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)
    torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
