"""What the first worker of an asynchronous replica tells the others between two leases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.domain.ids import Caller, Incarnation, JobId, Term, Token
from shardyard.domain.push_names import DataLease, DataShardSource
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.consistency.groups.work_messages import Told, WorkMessage
from shardyard_worker.data.led_feed import LedFeed

LEASE = DataLease(DataShardSource(0, 0, 0), Token(7), 0, 8)


class Strategy:
    """Of a worker that leads. It is told to leave its group when it tells `lost_at`."""

    becomes_synchronous = False
    leads = True

    def __init__(self, done: list[str], lost_at: Told | None = None) -> None:
        self._done, self._lost_at = done, lost_at

    def resume(self) -> None: ...

    def check(self) -> None: ...

    def tell(self, message: WorkMessage) -> None:
        if message.told is self._lost_at:
            raise GroupLost("a member is gone")
        self._done.append(message.told.name)

    def await_answers(self) -> None:
        self._done.append("all answered")


def leading(done: list[str], lost_at: Told | None = None) -> LedFeed:
    """Its first go through the lease loses the work, the second one closes the lease."""
    feed: Any = LedFeed.__new__(LedFeed)
    feed._number, feed.work, feed._leased, feed._is_over, feed._is_unsure = 0, None, None, False, False
    feed._held, feed._ahead = {}, []
    feed._strategy = Strategy(done, lost_at)
    feed._session = SimpleNamespace(drain=SimpleNamespace(asked=False), step_barrier=SimpleNamespace(stop=None))
    goes, leases = iter([False, True]), iter([LEASE, LEASE, None])

    def go_through(lease: DataLease) -> Iterator[Any]:
        done.append("opens")
        if next(goes):
            feed._close(lease)
        yield from ()

    feed._lease, feed._go_through = lambda: next(leases), go_through
    feed._strategy.finish_pushes = lambda: None
    feed._end_lease = lambda lease: done.append(f"ends lease {lease.token}")
    made: LedFeed = feed
    return made


def test_a_lease_is_opened_again_and_closed_when_all_pushes_are_answered() -> None:
    done: list[str] = []
    assert list(leading(done)._lead()) == []
    answered = ["ANSWERED", "all answered"]
    assert done == ["opens", *answered, "opens", *answered, "ends lease 7", "ENDS"]


def test_a_lease_is_given_back_when_the_group_is_lost() -> None:
    done: list[str] = []
    feed = leading(done, Told.ANSWERED)
    with pytest.raises(GroupLost):
        list(feed._lead())
    feed._return_leases()
    feed._return_leases()
    assert done == ["opens", "ends lease 7"]


def test_all_leases_are_given_back_when_the_group_is_lost() -> None:
    """One whose work was lost, one that was opened after it, and one that was leased ahead."""
    done: list[str] = []
    feed = leading(done, Told.ENDS)
    leases = iter([LEASE, replace(LEASE, token=Token(8)), None])
    feed._go_through = lambda lease: iter(())  # type: ignore[method-assign]
    feed._lease = lambda: next(leases)  # type: ignore[method-assign]
    with pytest.raises(GroupLost):
        list(feed._lead())
    feed._ahead = [replace(LEASE, token=Token(9))]
    feed._return_leases()
    assert done[-3:] == ["ends lease 7", "ends lease 8", "ends lease 9"]


@pytest.mark.parametrize("is_held", [True, False])
def test_lease_whose_answer_was_lost_is_given_back(is_held: bool) -> None:
    done: list[str] = []
    feed: Any = leading(done)
    feed._held, feed._is_unsure = {LEASE.token: LEASE}, True
    asked: list[wire.LeaseDataRequest] = []

    def ask(_: object, request: wire.LeaseDataRequest) -> wire.LeaseDataReply:
        asked.append(request)
        unknown = lease_messages.data_lease_to_wire(replace(LEASE, token=Token(8)))
        return wire.LeaseDataReply(lease=unknown) if is_held else wire.LeaseDataReply(wait=wire.LeaseWait())

    feed._session.ask, feed._session.caller = ask, Caller(JobId(1), Incarnation(3), Term(1))
    feed._return_leases()
    assert [list(each.known) for each in asked] == [[7]]
    assert done == ["ends lease 7", *(["ends lease 8"] if is_held else [])]
    feed._return_leases()
    assert len(asked) == 1
