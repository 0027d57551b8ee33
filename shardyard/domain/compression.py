"""The codecs of gradients and values: their texts, ranges and rules.

Owns: the text of a codec ("topk:0.001:int8"), what may be combined, and which variables a rule covers. Settings,
workers (which choose codecs) and servers (which answer pulls) use it. docs/guides/compression.md is the page for users.
Must not know: how a code is made (shardyard.codecs).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.variables import VariableKind, VariableSpec

BUCKET_MIN: Final = 16
BUCKET_MAX: Final = 65_536
BUCKET_MULTIPLE: Final = 8
BUCKET: Final = 1_024
QSGD_BUCKET: Final = 512
QSGD_LEVELS: Final = 15
LEVELS_MAX: Final = 127
DENSITY_MIN: Final = 1e-6
DENSITY_MAX: Final = 0.5
RANK_MAX: Final = 64
RULES_MAX: Final = 64
RULES_CHARACTERS_MAX: Final = 1_024
WHOLE_ELEMENTS_MAX: Final = 1_024
"""Default of `job.compression.whole_elements_max`."""

FORMS: Final[dict[str, str]] = {
    "none": "none",
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8[:BUCKET]",
    "qsgd": "qsgd[:LEVELS[:BUCKET]]",
    "onebit": "onebit[:BUCKET]",
    "topk": "topk:DENSITY[:fp32|fp16|int8]",
    "randomk": "randomk:DENSITY[:unbiased]",
    "powersgd": "powersgd[:RANK]",
    "delta": "delta[:BUCKET]",
}
"""How each codec is written."""
PUSH_KINDS: Final = tuple(kind for kind in FORMS if kind != "delta")
PULL_KINDS: Final = ("none", "bf16", "fp16", "int8", "delta")
ZSTD_KINDS: Final = ("bf16", "int8", "qsgd", "delta")
"""Codecs for which zstd is worth its time. docs/guides/compression.md has the figures for the others."""
TOPK_VALUES: Final = ("fp32", "fp16", "int8")

PUSHES: Final = "pushes"
RESIDUAL: Final = "residual"
MOMENTUM: Final = "momentum"
FACTOR: Final = "factor"
"""The names of error feedback's state in workers and in checkpoints."""

_NO_ZSTD: Final = {
    "none": "float32 gradients shrink by 6%, at 45 ms of CPU for 16 MiB (int8+zstd: by 85%, at 10 ms)",
    "fp16": "halves shrink by 6% (bf16: by 19%)",
    "onebit": "signs do not shrink, and the scales of small buckets by a tenth",
    "topk": "its indices are entropy-coded already, and its values shrink by a tenth",
    "randomk": "its values shrink by 6%",
    "powersgd": "its factors shrink by 6%",
}
_NUMBER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?")
_WHOLE = "whole:"


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """One codec with its parameters. Parameters that its kind does not have are at their defaults. `str` gives its
    text."""

    kind: str
    bucket: int = 0
    levels: int = 0
    density: float = 0.0
    values: str = ""
    unbiased: bool = False
    rank: int = 0
    zstd: bool = False

    @property
    def has_feedback(self) -> bool:
        """Whether the sender keeps what it did not send, and adds it to the next gradient."""
        return self.kind in ("int8", "onebit", "topk", "powersgd") or (self.kind == "randomk" and not self.unbiased)

    def __str__(self) -> str:
        match self.kind:
            case "int8" | "onebit" | "delta":
                text = f"{self.kind}:{self.bucket}"
            case "qsgd":
                text = f"qsgd:{self.levels}:{self.bucket}"
            case "topk":
                text = f"topk:{self.density!r}" + (f":{self.values}" if self.values != "fp32" else "")
            case "randomk":
                text = f"randomk:{self.density!r}" + (":unbiased" if self.unbiased else "")
            case "powersgd":
                text = f"powersgd:{self.rank}"
            case _:
                text = self.kind
        return text + ("+zstd" if self.zstd else "")


NONE: Final = CodecSpec("none")


def parse_codec(text: str, kinds: Iterable[str] = tuple(FORMS)) -> CodecSpec:
    """The codec for a text such as "int8:1024" or "int8+zstd". `str` of the result is its canonical text.

    `kinds`: those that are allowed. Raises ConfigurationError, which says what was expected and what was given.
    """
    allowed = tuple(kinds)
    bare, plus, wrapper = text.partition("+")
    kind, *numbers = bare.split(":")
    if kind not in allowed:
        known = ", ".join(FORMS[each] for each in allowed)
        raise _wrong(text, f"one of {known}", kind)
    if plus and wrapper != "zstd":
        raise _wrong(text, "+zstd after a codec, or nothing", f"+{wrapper}")
    if plus and kind not in ZSTD_KINDS:
        raise _wrong(
            text, f"+zstd after one of {', '.join(k for k in ZSTD_KINDS if k in allowed)}: {_NO_ZSTD[kind]}", text
        )
    if len(numbers) > FORMS[kind].count(":"):
        raise _wrong(text, FORMS[kind], bare)
    return _with_parameters(text, kind, numbers, zstd=bool(plus))


def _with_parameters(text: str, kind: str, given: list[str], *, zstd: bool) -> CodecSpec:
    match kind:
        case "int8" | "onebit" | "delta":
            return CodecSpec(kind, bucket=_bucket(text, given[0]) if given else BUCKET, zstd=zstd)
        case "qsgd":
            levels = _whole(text, given[0], "LEVELS", 1, LEVELS_MAX) if given else QSGD_LEVELS
            bucket = _bucket(text, given[1]) if len(given) > 1 else QSGD_BUCKET
            return CodecSpec(kind, levels=levels, bucket=bucket, zstd=zstd)
        case "topk":
            values = given[1] if len(given) > 1 else "fp32"
            if values not in TOPK_VALUES:
                raise _wrong(text, f"values as one of {', '.join(TOPK_VALUES)}", values)
            return CodecSpec(kind, density=_density(text, given), values=values)
        case "randomk":
            if len(given) > 1 and given[1] != "unbiased":
                raise _wrong(text, FORMS[kind], given[1])
            return CodecSpec(kind, density=_density(text, given), unbiased=len(given) > 1)
        case "powersgd":
            return CodecSpec(kind, rank=_whole(text, given[0], "RANK", 1, RANK_MAX) if given else 2)
        case _:
            return CodecSpec(kind, zstd=zstd)


def _whole(text: str, given: str, name: str, low: int, high: int) -> int:
    if not _NUMBER.fullmatch(given) or not low <= int(given) <= high:
        raise _wrong(text, f"{name}, a whole number from {low} to {high}", given)
    return int(given)


def _bucket(text: str, given: str) -> int:
    bucket = _whole(text, given, "BUCKET", BUCKET_MIN, BUCKET_MAX)
    if bucket % BUCKET_MULTIPLE:
        raise _wrong(text, f"BUCKET, a multiple of {BUCKET_MULTIPLE}", given)
    return bucket


def _density(text: str, given: list[str]) -> float:
    expected = f"DENSITY, the part of the elements that is sent, from {DENSITY_MIN:.6f} to {DENSITY_MAX}"
    if not given or not _DECIMAL.fullmatch(given[0]):
        raise _wrong(text, expected, given[0] if given else "nothing")
    density = float(given[0])
    if not DENSITY_MIN <= density <= DENSITY_MAX:
        raise _wrong(text, expected, given[0])
    return density


def _wrong(text: str, expected: str, got: str) -> ConfigurationError:
    facts = {"expected": expected, "got": _shown(got)}
    return ConfigurationError(f"compression {_shown(text)}: expected {expected}, got {_shown(got)}", facts=facts)


def _shown(text: str) -> str:
    cut = text if len(text) <= 60 else text[:57] + "..."
    return '"' + cut.encode("unicode_escape").decode("ascii") + '"'


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern for names of variables (as in a shell: * ? [abc]), and the codec of those that match."""

    pattern: str
    codec: CodecSpec

    def __str__(self) -> str:
        return f"{self.pattern}={self.codec}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The codec of each variable. The first rule that matches wins; without a match it is "none".

    These are never compressed: buffers, variables that are not floating-point, with fewer than two dimensions, or with
    at most `whole_elements_max` elements. `str` gives one text, which `parse_rules` reads (PullRequest.coding).
    """

    rules: tuple[Rule, ...]
    whole_elements_max: int = WHOLE_ELEMENTS_MAX

    @property
    def compresses(self) -> bool:
        """Whether any variable could be compressed."""
        return any(rule.codec != NONE for rule in self.rules)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(rule.codec.kind for rule in self.rules)

    def codec_for(self, variable: VariableSpec) -> CodecSpec:
        if (
            variable.kind is VariableKind.BUFFER
            or not variable.dtype.is_floating
            or len(variable.shape) < 2
            or variable.elements <= self.whole_elements_max
        ):
            return NONE
        for rule in self.rules:
            if fnmatch.fnmatchcase(variable.name, rule.pattern):
                return rule.codec
        return NONE

    @property
    def has_feedback(self) -> bool:
        """Whether some codec keeps what it did not send."""
        return any(rule.codec.has_feedback for rule in self.rules)

    def keep_feedback(self, variables: Iterable[VariableSpec]) -> bool:
        """Whether any of the variables has a codec with error feedback."""
        return any(self.codec_for(variable).has_feedback for variable in variables)

    def __str__(self) -> str:
        return " ".join((f"{_WHOLE}{self.whole_elements_max}", *(str(rule) for rule in self.rules)))


def parse_push_rules(text: str, whole_elements_max: int = WHOLE_ELEMENTS_MAX) -> Rules:
    """`parse_rules` with the codecs that gradients may have."""
    return parse_rules(text, whole_elements_max, kinds=PUSH_KINDS)


def parse_pull_rules(text: str, whole_elements_max: int = WHOLE_ELEMENTS_MAX) -> Rules:
    """`parse_rules` with the codecs that values may have."""
    return parse_rules(text, whole_elements_max, kinds=PULL_KINDS)


def parse_rules(
    text: str, whole_elements_max: int = WHOLE_ELEMENTS_MAX, *, kinds: Iterable[str] = tuple(FORMS)
) -> Rules:
    """Reads rules: one codec for all variables, or PATTERN=CODEC separated by spaces, after an optional "whole:N".

    "" means no codec. Raises ConfigurationError.
    """
    allowed = tuple(kinds)
    if len(text) > RULES_CHARACTERS_MAX:
        raise _wrong(text, f"at most {RULES_CHARACTERS_MAX} characters", f"{len(text)} characters")
    words = text.split()
    if words and words[0].startswith(_WHOLE):
        given = words.pop(0).removeprefix(_WHOLE)
        whole_elements_max = _whole(text, given, "N", 0, limits.BLOCK_ELEMENTS_MAX)
    if len(words) > RULES_MAX:
        raise _wrong(text, f"at most {RULES_MAX} rules", f"{len(words)} rules")
    if len(words) == 1 and "=" not in words[0]:
        return Rules((Rule("*", parse_codec(words[0], allowed)),), whole_elements_max)
    return Rules(tuple(_rule(text, word, allowed) for word in words), whole_elements_max)


def _rule(text: str, word: str, allowed: tuple[str, ...]) -> Rule:
    pattern, equals, codec = word.rpartition("=")
    if not equals or not pattern:
        raise _wrong(text, "one codec, or rules PATTERN=CODEC parted by spaces", word)
    return Rule(pattern, parse_codec(codec, allowed))


def sent_count(elements: int, density: float) -> int:
    """How many of `elements` a sparse code has: density * elements, rounded, but at least 1 of a block with
    elements."""
    return min(elements, max(1, math.floor(density * elements + 0.5))) if elements else 0
