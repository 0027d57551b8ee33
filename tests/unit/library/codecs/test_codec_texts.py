"""Texts that name codecs in settings, and rules that say which variable has which."""

from __future__ import annotations

import pytest

from shardyard.domain.compression import (
    FORMS,
    NONE,
    PULL_KINDS,
    PUSH_KINDS,
    RULES_CHARACTERS_MAX,
    ZSTD_KINDS,
    parse_codec,
    parse_pull_rules,
    parse_push_rules,
    parse_rules,
)
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.variables import DType, VariableKind, VariableSpec

# --- texts


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("int8", "int8:1024"),
        ("int8:64", "int8:64"),
        ("int8+zstd", "int8:1024+zstd"),
        ("qsgd", "qsgd:15:512"),
        ("qsgd:7", "qsgd:7:512"),
        ("onebit", "onebit:1024"),
        ("topk:.001", "topk:0.001"),
        ("topk:1e-5", "topk:1e-05"),
        ("topk:0.001:fp32", "topk:0.001"),
        ("topk:0.001:int8", "topk:0.001:int8"),
        ("randomk:0.01:unbiased", "randomk:0.01:unbiased"),
        ("powersgd", "powersgd:2"),
        ("delta+zstd", "delta:1024+zstd"),
        ("bf16+zstd", "bf16+zstd"),
    ],
)
def test_codec_text_has_a_canonical_form(text: str, canonical: str) -> None:
    codec = parse_codec(text)
    assert str(codec) == canonical
    assert parse_codec(canonical) == codec


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("", "one of none, bf16", '""'),
        ("int9", "one of none, bf16", '"int9"'),
        ("INT8", "one of none, bf16", '"INT8"'),
        ("int8:", "BUCKET, a whole number from 16 to 65536", '""'),
        ("int8:8", "BUCKET, a whole number from 16 to 65536", '"8"'),
        ("int8:20", "BUCKET, a multiple of 8", '"20"'),
        ("int8:64:3", "int8[:BUCKET]", '"int8:64:3"'),
        ("int8:٦٤", "BUCKET, a whole number", '"\\u0666\\u0664"'),
        ("qsgd:128", "LEVELS, a whole number from 1 to 127", '"128"'),
        ("topk", "DENSITY", '"nothing"'),
        ("topk:0", "DENSITY", '"0"'),
        ("topk:0.6", "DENSITY", '"0.6"'),
        ("topk:nan", "DENSITY", '"nan"'),
        ("topk:0.1:fp64", "values as one of fp32, fp16, int8", '"fp64"'),
        ("randomk:0.1:scaled", "randomk:DENSITY[:unbiased]", '"scaled"'),
        ("powersgd:0", "RANK, a whole number from 1 to 64", '"0"'),
        ("none:3", "none", '"none:3"'),
        ("int8+gzip", "+zstd after a codec, or nothing", '"+gzip"'),
        ("none+zstd", "by 6%, at 45 ms of CPU for 16 MiB", '"none+zstd"'),
        ("topk:0.1+zstd", "+zstd after one of bf16, int8, qsgd, delta: its indices", '"topk:0.1+zstd"'),
    ],
)
def test_wrong_codec_says_what_was_expected(text: str, expected: str, got: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_codec(text)
    assert expected in caught.value.facts["expected"]
    assert caught.value.facts["got"] == got
    assert len(caught.value.what) < 400


def test_every_kind_has_a_direction_and_zstd_its_figures() -> None:
    assert set(PUSH_KINDS) | set(PULL_KINDS) == set(FORMS)
    for kind in FORMS:
        text = kind + (":0.1" if "DENSITY" in FORMS[kind] else "") + "+zstd"
        if kind in ZSTD_KINDS:
            assert parse_codec(text).zstd
        else:
            with pytest.raises(ConfigurationError):
                parse_codec(text)


def variable(name: str, *shape: int, kind: VariableKind = VariableKind.PARAMETER, dtype: DType = DType.FLOAT32):
    return VariableSpec(name, dtype, shape, kind)


def test_first_rule_that_matches_wins_and_without_one_it_is_none() -> None:
    rules = parse_push_rules("embed.*=none *.weight=topk:0.001 head[12]=int8")
    texts = {
        name: str(rules.codec_for(variable(name, 100, 100))) for name in ("embed.weight", "a.weight", "head2", "x")
    }
    assert texts == {"embed.weight": "none", "a.weight": "topk:0.001", "head2": "int8:1024", "x": "none"}
    assert rules.kinds == {"none", "topk", "int8"}
    assert rules.compresses
    assert not parse_push_rules("*=none").compresses
    assert not parse_push_rules("").compresses


def test_small_flat_and_other_variables_stay_whole() -> None:
    rules = parse_push_rules("int8", 100)
    assert rules.codec_for(variable("w", 10, 11)).kind == "int8"
    for spec in (
        variable("w", 10, 10),
        variable("bias", 5_000),
        variable("scale"),
        variable("mean", 50, 50, kind=VariableKind.BUFFER),
        variable("count", 50, 50, dtype=DType.INT64),
    ):
        assert rules.codec_for(spec) == NONE


def test_rules_have_one_text_with_all_of_it() -> None:
    rules = parse_pull_rules(" *.weight=bf16   *=int8+zstd ", 77)
    assert str(rules) == "whole:77 *.weight=bf16 *=int8:1024+zstd"
    assert parse_pull_rules(str(rules)) == rules
    assert str(parse_rules("bf16")) == "whole:1024 *=bf16"


@pytest.mark.parametrize(
    "text",
    [
        "int8 topk:0.1",
        "=int8",
        "*=int9",
        "whole:x int8",
        "whole:99999999999 int8",
        "a=int8 " * 65,
        "x" * (RULES_CHARACTERS_MAX + 1),
    ],
)
def test_wrong_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_rules(text)


def test_each_direction_takes_its_own_codecs() -> None:
    for kind in ("topk:0.1", "onebit", "powersgd", "qsgd", "randomk:0.1"):
        with pytest.raises(ConfigurationError, match="expected one of none, bf16, fp16"):
            parse_pull_rules(kind)
    with pytest.raises(ConfigurationError, match="expected one of none"):
        parse_push_rules("delta")
