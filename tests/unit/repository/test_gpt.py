"""The GPT example: what a place sees, which parameters decay, and how a text is cut into passages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import model  # noqa: E402
import passages  # noqa: E402

sys.path.remove(str(EXAMPLE))

SHAPE = model.Shape(layers=2, heads=2, width=16, block=12)


@pytest.fixture
def gpt() -> model.GPT:
    torch.manual_seed(1)
    made = model.GPT(SHAPE)
    for parameter in made.parameters():  # large enough for each part to matter
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def test_place_sees_itself_and_what_is_before_it(gpt: model.GPT) -> None:
    tokens = torch.randint(256, (1, SHAPE.block))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    differs = (gpt(tokens) - gpt(changed)).abs().amax(dim=2)[0] > 1e-4
    assert differs.tolist() == [False] * 5 + [True] * (SHAPE.block - 5)


def test_order_of_what_is_before_a_place_matters(gpt: model.GPT) -> None:
    first, second = gpt(torch.tensor([[1, 2, 3]])), gpt(torch.tensor([[2, 1, 3]]))
    assert (first - second)[0, -1].abs().max() > 1e-4


def test_product_of_query_and_key_depends_on_their_distance() -> None:
    rotation = model.Rotation(8, 12)
    query, key = (torch.randn(8).expand(1, 1, 12, 8) for _ in range(2))
    products = (rotation(query) @ rotation(key).transpose(2, 3))[0, 0]
    for distance in range(-11, 12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_matrices_decay_and_all_other_parameters_do_not(gpt: model.GPT) -> None:
    decayed, others = model.decay_groups(gpt, 0.1)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    ends = {names[id(parameter)].rsplit(".", 2)[-2] for parameter in decayed["params"]}
    assert ends == {"q", "k", "v", "out", "up", "down", "head"}
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_same_generator_writes_the_same_text_longer_than_a_passage(gpt: model.GPT) -> None:
    texts = [
        model.generate(
            gpt, b"def", count=20, block=SHAPE.block, temperature=1.0, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith(b"def") and len(text) == 23 for text in texts)


def test_each_byte_is_predicted_in_one_passage_of_one_part() -> None:
    text = torch.arange(1 + 100 * 2, dtype=torch.uint8)
    train, held_out = passages.cut(text, block=2)
    assert (len(train), len(held_out)) == (95, 5)
    predicted = torch.cat((train, held_out))[:, 1:].flatten()
    assert sorted(predicted.tolist()) == list(range(1, 201))


def test_passages_are_spread_over_the_text() -> None:
    train, held_out = passages.cut(torch.arange(201, dtype=torch.uint8), block=2, train=5, held_out=2)
    assert (len(train), len(held_out)) == (5, 2)
    assert (int(train[0, 0]), int(train[-1, 0])) == (0, 160)


@pytest.mark.parametrize("size", [0, 1, 8, 16])
def test_text_without_two_passages_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="give more text"):
        passages.cut(torch.zeros(size, dtype=torch.uint8), block=8)


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name, text in (("a.py", b"x = 1\n"), ("b.py", b"")):
        (tmp_path / name).write_bytes(text)
    found = passages.read(passages.sources(tmp_path))
    assert bytes(found.tolist()) == b"x = 1\n\0\0"


def test_sources_are_those_of_the_standard_library_without_tests() -> None:
    found = passages.sources()
    assert len(found) > 300
    assert not any({"site-packages", "test", "encodings"} & set(path.parts) for path in found)
