"""Rows on their way: cut by partition, each coded once, rounded by the work that they come from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from shardyard.codecs.rows.row_ids import decode_ids
from shardyard.codecs.rows.row_values import decode_rows, encode_rows
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token
from shardyard.domain.pulls import RowCode
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey, WorkerSource
from shardyard_worker.rows.dedup import unique_ids
from shardyard_worker.rows.row_codec import EncodedRows, Rounding, TableRows, questions
from shardyard_worker.training.pushes import _seed_of

DIM = 6
IDS = np.random.default_rng(0).permutation(np.arange(-40, 60) * 1_000_003)


def gradient_of(ids: np.ndarray) -> np.ndarray:
    return np.stack([np.random.default_rng(abs(int(number))).standard_normal(DIM) for number in ids]).astype(np.float32)


def coded(ids: np.ndarray, rounding: Rounding, partitions: int = 1, table: int = 3) -> dict[int, bytes]:
    """What arrives for each id."""
    found = unique_ids(ids, partitions)
    said, pieces = EncodedRows([TableRows(table, found, gradient_of(found.ids))], ((1.0,),), rounding).of(
        [PartitionId(number) for number in range(partitions)]
    )
    (one,) = said
    if rounding.code is RowCode.FLOAT32:
        assert one.rows == tuple(np.diff(found.starts).tolist())
        assert (one.id_bytes, one.row_bytes) == ((), (4 * DIM * sum(one.rows),))
        data = b"".join(pieces)
        numbers = np.frombuffer(data[: 8 * sum(one.rows)], np.int64)
        rows = np.frombuffer(data[8 * sum(one.rows) :], np.float32).reshape(-1, DIM)
        return {int(number): row.tobytes() for number, row in zip(numbers, rows, strict=True)}
    assert [len(piece) for piece in pieces] == [
        n for pair in zip(one.id_bytes, one.row_bytes, strict=True) for n in pair
    ]
    arrived = {}
    for at, n in enumerate(one.rows):
        numbers = decode_ids(pieces[2 * at], n)
        rows = decode_rows(pieces[2 * at + 1], n, DIM)
        arrived |= {int(number): row.tobytes() for number, row in zip(numbers, rows, strict=True)}
    return arrived


def test_rows_travel_packed_unless_it_is_said_otherwise() -> None:
    expected = {int(number): row.tobytes() for number, row in zip(IDS, gradient_of(IDS), strict=True)}
    assert coded(IDS, Rounding(RowCode.FLOAT32, 1, (2,)), partitions=4) == expected
    assert coded(IDS, Rounding(RowCode.FLOAT32, 1, (2,))) == {
        int(number): row.tobytes() for number, row in zip(IDS, gradient_of(IDS), strict=True)
    }


def test_packed_rows_are_views_and_a_server_gets_its_own() -> None:
    found = unique_ids(IDS, 4)
    gradients = gradient_of(found.ids)
    encoded = EncodedRows([TableRows(3, found, gradients)], ((1.0,),))
    for owned, pieces_expected in (((0, 1, 2, 3), 2), ((1, 2), 2), ((0, 2), 4), ((3,), 2)):
        ((said,), pieces) = encoded.of([PartitionId(number) for number in owned])
        assert said.partitions == owned
        assert len(pieces) == pieces_expected  # adjacent partitions are one piece
        mine = np.concatenate([np.arange(*found.starts[number : number + 2]) for number in owned])
        data = b"".join(pieces)
        assert data == found.ids[mine].tobytes() + gradients[mine].tobytes()
        assert len(data) == said.payload_bytes
    assert np.shares_memory(np.frombuffer(pieces[1], np.float32), gradients)


@pytest.mark.parametrize("code", [RowCode.BF16, RowCode.INT8])
def test_work_that_is_computed_again_arrives_as_the_same_bits_whatever_the_map(code: RowCode) -> None:
    once = coded(IDS, Rounding(code, 5, (1, 0, 2, 3, 7, 7)))
    assert coded(IDS[::-1], Rounding(code, 5, (1, 0, 2, 3, 7, 7)), partitions=4) == once
    for other in (Rounding(code, 6, (1, 0, 2, 3, 7, 7)), Rounding(code, 5, (1, 0, 2, 3, 8, 8))):
        assert coded(IDS, other) != once
    assert coded(IDS, Rounding(code, 5, (1, 0, 2, 3, 7, 7)), table=4) != once


def name(source: Source, first: int, last: int | None = None, token: int = 1) -> PushName:
    return PushName(SourceKey(source), Token(token), first, first if last is None else last)


def test_work_is_known_by_its_name_without_the_token() -> None:
    assert _seed_of(name(DataShardSource(0, 1, 2), 3)) == _seed_of(name(DataShardSource(0, 1, 2), 3, token=9))
    different = [
        name(DataShardSource(0, 1, 2), 3),
        name(DataShardSource(0, 1, 3), 3),
        name(DataShardSource(0, 2, 2), 3),
        name(DataShardSource(1, 1, 2), 3),
        name(DataShardSource(0, 1, 2), 4),
        name(DataShardSource(0, 1, 2), 3, 4),
        name(RankSource(Rank(1)), 3),
        name(RankSource(Rank(2)), 3),
        name(RankSource(Rank(1)), 4),
        name(WorkerSource(Incarnation(1)), 3),
        name(WorkerSource(Incarnation(2)), 3),
        name(WorkerSource(Incarnation(1)), 4),
    ]
    assert len({_seed_of(each) for each in different}) == len(different)


# ---- answers


@pytest.mark.parametrize("code", list(RowCode))
def test_answers_are_put_in_their_places(code: RowCode) -> None:
    found, other = unique_ids(IDS, 3), unique_ids(IDS[:9], 3)
    wanted = [(0, found, DIM), (1, other, 2)]
    into = [np.full((found.ids.size, DIM), np.nan, np.float32), np.full((other.ids.size, 2), np.nan, np.float32)]
    rows = [gradient_of(found.ids), gradient_of(other.ids)[:, :2].copy()]
    for question in questions(wanted, [PartitionId(0), PartitionId(2)], 1_500):
        pieces = [rows[look_up][begin:end] for look_up, begin, end in question.answers]
        answer = b"".join(
            each.tobytes() if code is RowCode.FLOAT32 else bytes(encode_rows(each, code)) for each in pieces
        )
        question.put(memoryview(answer), into, code)
        with pytest.raises(MalformedPayload):
            question.put(memoryview(answer + b"M"), into, code)
        with pytest.raises(MalformedPayload):
            question.put(memoryview(answer[:-1]), into, code)
    for asked, given, looked_up in zip(into, rows, (found, other), strict=True):
        (a, b), (c, d), (e, f) = pairwise(looked_up.starts.tolist())
        assert np.isnan(asked[c:d]).all()
        for mine in (slice(a, b), slice(e, f)):
            bound = {RowCode.FLOAT32: 0.0, RowCode.BF16: 2.0**-8, RowCode.INT8: 1 / 250}[code]
            limit = bound * np.abs(given[mine]).max(axis=1, keepdims=True)
            assert (np.abs(asked[mine] - given[mine]) <= limit).all()


def test_a_question_names_the_ids_whose_rows_it_has_places_for() -> None:
    wanted = [(4, unique_ids(IDS, 3), DIM), (7, unique_ids(IDS[:9], 3), 2)]
    asked: list[list[int]] = [[], []]
    for question in questions(wanted, [PartitionId(0), PartitionId(2)], 1_500):
        numbers, answers = np.frombuffer(b"".join(question.ids), np.int64).tolist(), iter(question.answers)
        for said in question.requested:
            for partition, n in zip(said.partitions, said.rows, strict=True):
                look_up, begin, end = next(answers)
                _, found, _ = wanted[look_up]
                assert (said.table, n) == (wanted[look_up][0], end - begin)
                assert found.starts[partition] <= begin < end <= found.starts[partition + 1]
                assert numbers[:n] == found.ids[begin:end].tolist()
                numbers = numbers[n:]
                asked[look_up] += range(begin, end)
        assert numbers == []
        assert next(answers, None) is None
    for (_, found, _), places in zip(wanted, asked, strict=True):
        (a, b), (_, _), (e, f) = pairwise(found.starts.tolist())
        assert sorted(places) == [*range(a, b), *range(e, f)]


def test_a_question_has_room_for_its_answer_in_any_code() -> None:
    """A row that a code cannot say comes as it is, with the code's head."""
    found = unique_ids(IDS, 3)
    for question in questions([(0, found, DIM)], [PartitionId(n) for n in range(3)], 600):
        rows = [np.full((end - begin, DIM), np.inf, np.float32) for _, begin, end in question.answers]
        for code in (RowCode.BF16, RowCode.INT8):
            assert sum(len(encode_rows(each, code)) for each in rows) <= 600
