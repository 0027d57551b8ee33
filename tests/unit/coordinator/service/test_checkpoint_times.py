"""When the coordinator takes checkpoints."""

from __future__ import annotations

from shardyard.config.settings import CheckpointSettings
from shardyard.domain.errors import NotReady, StorageUnavailable
from shardyard.domain.ids import Token
from shardyard_coordinator.records import Body
from shardyard_coordinator.storage.checkpoint_book import RETRY_MS, CheckpointBook, url_of

FULL = StorageUnavailable("no space left")


def book(**settings: object) -> CheckpointBook:
    given = CheckpointSettings.model_validate(settings)
    return CheckpointBook(given, url_of(given, "/somewhere"), 0)


def committed(found: CheckpointBook, now_ms: int = 0, step: int = 0) -> CheckpointBook:
    draft, _ = found.begin(now_ms, step, {}, Token(0))
    assert found.commit(draft.number, step, draft.number, 100) is not None
    return found


def test_first_checkpoint_is_due_at_once_and_one_at_a_time() -> None:
    found = book()
    assert found.is_due(0, 0)
    draft, record = found.begin(0, 0, {}, Token(3))
    assert (draft.number, draft.floor, record) == (1, 3, ("checkpoint_begun", {"number": 1}))
    assert not found.is_due(10**9, 10**9)
    found.want()
    assert not found.is_due(10**9, 10**9)


def test_checkpoints_are_due_by_time_by_steps_and_on_command() -> None:
    found = committed(book(every_s=60, every_steps=100))
    assert not found.is_due(59_999, 99)
    assert found.is_due(60_000, 1)
    assert not found.is_due(60_000, 0)  # nothing new
    assert found.is_due(1, 100)
    found.want()
    assert found.is_due(1, 0)
    assert not committed(book(every_s=0)).is_due(10**9, 10**9)
    assert not book(url="never").is_due(10**9, 10**9)


def test_checkpoint_that_failed_is_tried_again_under_another_number_and_not_too_soon() -> None:
    found = committed(book())
    draft, _ = found.begin(0, 5, {}, Token(0))
    assert found.fail(draft.number, FULL, 1_000)
    assert not found.fail(draft.number, FULL, 1_000)
    assert found.commit(draft.number, 5, 9, 100) is None
    assert not found.is_due(1_000 + RETRY_MS - 1, 5)
    assert found.is_due(1_000 + RETRY_MS, 5)
    assert found.begin(3_000, 5, {}, Token(0))[0].number == 3
    assert found.base == 1


def test_checkpoint_of_a_past_that_was_taken_back_does_not_count() -> None:
    found = committed(book())
    draft, _ = found.begin(0, 5, {}, Token(0))
    found.abandon()
    assert found.commit(draft.number, 5, 9, 100) is None
    assert (found.base, found.is_due(0, 5)) == (1, True)


def test_records_bring_back_the_newest_checkpoint_and_the_next_number() -> None:
    found = committed(book(), step=4)
    found.begin(1, 9, {}, Token(0))
    for entries in (found.entries(), [("checkpoint_begun", {"number": 1}), *found.entries()]):
        again = book()
        for kind, body in entries:
            again.restore(kind, Body(body))
        assert (again.committed, again.draft) == (found.committed, None)
        assert again.entries() == found.entries()
        assert again.begin(0, 9, {}, Token(0))[0].number == 3


def test_steps_count_from_the_newest_checkpoint_after_a_restart() -> None:
    found = committed(book(every_s=0, every_steps=100), step=950)
    found.begin(1, 1_050, {}, Token(0))  # lost with the coordinator
    again = book(every_s=0, every_steps=100)
    for kind, body in found.entries():
        again.restore(kind, Body(body))
    assert not again.is_due(0, 1_049)
    assert again.is_due(0, 1_050)


def test_steps_count_from_the_checkpoint_to_which_the_job_goes_back() -> None:
    found = committed(book(every_s=0, every_steps=100), step=50)
    first = found.committed
    assert first is not None
    committed(found, step=950)
    found.go_back(first)
    assert not found.is_due(0, 149)
    assert found.is_due(0, 150)


def test_checkpoint_that_is_asked_for_begins_after_the_asking() -> None:
    found = committed(book(every_s=0))
    under_way, _ = found.begin(0, 5, {}, Token(0))
    ticket = found.ask()
    assert found.commit(under_way.number, 5, 40, 100) is not None  # other runs have left 39
    assert found.outcome(ticket) is None
    draft, _ = found.begin(0, 5, {}, Token(0))
    assert found.commit(draft.number, 5, draft.number, 100) is not None
    assert found.outcome(ticket) == found.committed


def test_who_asked_for_a_checkpoint_hears_of_its_failure_and_of_the_next_ones_success() -> None:
    found = committed(book(every_s=0))
    ticket = found.ask()
    draft, _ = found.begin(0, 5, {}, Token(0))
    found.fail(draft.number, NotReady("a server is being started"), 0)
    assert found.outcome(ticket) is None
    draft, _ = found.begin(0, 5, {}, Token(0))
    found.fail(draft.number, FULL, 0)
    assert found.outcome(ticket) is FULL
    assert found.outcome(found.ask()) is None
    draft, _ = found.begin(0, 5, {}, Token(0))
    found.commit(draft.number, 5, draft.number, 100)
    assert found.outcome(ticket) == found.committed


def test_ticket_of_a_coordinator_that_died_is_good_for_the_next_one() -> None:
    found = committed(book(every_s=0))
    found.begin(0, 5, {}, Token(0))
    ticket = found.ask()
    again = book(every_s=0)
    for kind, body in found.entries():
        again.restore(kind, Body(body))
    assert not again.is_due(0, 5)
    assert again.outcome(ticket) is None
    assert again.is_due(0, 5)
    draft, _ = again.begin(0, 5, {}, Token(0))
    again.commit(draft.number, 5, draft.number, 100)
    assert again.outcome(ticket) == again.committed
