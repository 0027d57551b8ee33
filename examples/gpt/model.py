"""A small GPT: a decoder of transformer blocks that predicts the next byte.

The layers are those of Radford et al., Language Models are Unsupervised Multitask Learners (2019): LayerNorm before
each part of a block and once at the end. Positions are rotations (Su et al., RoFormer, arXiv:2104.09864), with which a
small model learns sooner than with learned positions. The projections of attention are layers of their own, and the
vectors of bytes are not those of the head. So a block, or a part of each of its matrices, can be moved elsewhere.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROTATION_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT. `block` is the longest passage that it reads, in bytes."""

    layers: int
    heads: int
    width: int
    block: int
    vocabulary: int = 256


class Rotation(nn.Module):
    """Turns pairs of a query's or a key's numbers by angles in proportion to the place, so that the product of a query
    and a key depends on how far apart they are. The pairs are (i, i + width / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, length_max: int) -> None:
        super().__init__()
        rates = ROTATION_BASE ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length_max).float(), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Shape (n, heads, length, width) in and out."""
        cos, sin = self.cos[: vectors.shape[2]], self.sin[: vectors.shape[2]]
        left, right = vectors.chunk(2, dim=3)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=3).type_as(vectors)


class Attention(nn.Module):
    """Causal self-attention: each place sees itself and the places before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_width = width // shape.heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.rotation = Rotation(self.head_width, shape.block)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, length, width) in and out."""
        q, k, v = (self._by_head(part(hidden)) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(self.rotation(q), self.rotation(k), v, is_causal=True)
        found: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return found

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        """Shape (n, heads, length, head_width), with as many heads as the projection has outputs for."""
        n, length, _ = projected.shape
        return projected.view(n, length, -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """Two layers with a GELU between them, applied to each place by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, length, width) in and out."""
        found: torch.Tensor = self.down(F.gelu(self.up(hidden)))
        return found


class Block(nn.Module):
    """Attention and an MLP. Each reads the normalized stream and adds to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.mlp_norm, self.mlp = nn.LayerNorm(shape.width), MLP(shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (n, length, width) in and out."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        found: torch.Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return found


class GPT(nn.Module):
    """`embed`, then each of `blocks`, then `norm` and `head`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._initialize(shape)

    def _initialize(self, shape: Shape) -> None:
        """Small normal values; smaller ones where a block adds to the stream, so that it stays as large as it was."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Block):
                for last in (module.attention.out, module.mlp.down):
                    nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 of shape (n, length) in, at most `block` long. Logits of the next byte, (n, length, vocabulary)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Parameter groups for AdamW: the matrices of linear layers decay; biases, norms and embeddings do not."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, *, count: int, block: int, temperature: float, generator: torch.Generator
) -> bytes:
    """The prompt and `count` bytes more, each drawn from what the model predicts after the last `block` bytes.

    The prompt has at least one byte. `temperature`, above 0, divides the logits. `generator` is on the CPU.
    """
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-block:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator)))
    return bytes(text)
