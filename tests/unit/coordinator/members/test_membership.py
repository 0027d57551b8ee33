"""Members by incarnation, their leases, and what is said of those that are gone."""

from __future__ import annotations

import dataclasses

import pytest

from shardyard.domain.errors import InvalidRequest, ProtocolMismatch, StaleIncarnation, TooLarge
from shardyard.domain.ids import Incarnation, MemberRole, Term
from shardyard_coordinator.members.membership import FORMER_MAX, Membership, Registration

WORKER = Registration(MemberRole.WORKER, "", 1, "0.1.0", "box", 7)
SERVER = Registration(MemberRole.SERVER, "10.0.0.1:7071", 1, "0.1.0", "box", 8)
AGENT = Registration(MemberRole.AGENT, "10.0.0.1:7072", 1, "0.1.0", "box", 9)


def members(term: int = 1, members_max: int = 10) -> Membership:
    return Membership(term=Term(term), lease_ms=1_000, members_max=members_max)


def test_incarnations_grow_and_differ_between_lives_of_the_coordinator() -> None:
    one, other = members(term=1), members(term=2)
    given = [one.add(WORKER, 0).incarnation for _ in range(3)]
    assert given == [(1 << 32) + 1, (1 << 32) + 2, (1 << 32) + 3]
    assert other.add(WORKER, 0).incarnation > max(given) + 1_000_000


def test_member_expires_when_its_lease_runs_out_unless_renewed() -> None:
    yard = members()
    silent, loud = yard.add(WORKER, 0), yard.add(WORKER, 0)
    yard.renew(loud.incarnation, 500)
    assert yard.expired(999) == ()
    ((member, how),) = yard.expired(1_000)
    assert member is silent
    assert how == "was silent for 1.0 s (lease 1 s)"


def test_time_in_which_the_coordinator_slept_does_not_count() -> None:
    yard = members()
    yard.add(WORKER, 0)
    yard.forgive(5_000)
    assert yard.expired(5_999) == ()
    assert len(yard.expired(6_000)) == 1


def test_request_of_a_former_member_is_refused_with_the_reason() -> None:
    yard = members()
    member = yard.add(WORKER, 0)
    yard.remove(member.incarnation, "was silent for 4 s")
    with pytest.raises(StaleIncarnation, match="was silent for 4 s"):
        yard.require(member.incarnation)
    with pytest.raises(StaleIncarnation, match="unknown to this coordinator"):
        yard.require(Incarnation(99))


def test_reasons_of_former_members_are_bounded() -> None:
    yard = members(members_max=FORMER_MAX + 10)
    first = yard.add(WORKER, 0)
    yard.remove(first.incarnation, "left")
    for _ in range(FORMER_MAX):
        yard.remove(yard.add(WORKER, 0).incarnation, "left")
    with pytest.raises(StaleIncarnation, match="unknown"):
        yard.require(first.incarnation)


def test_wrong_protocol_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolMismatch, match=r"protocol 9; this coordinator speaks 1\. .*install the same release"):
        members().check(dataclasses.replace(WORKER, protocol=9))


def test_server_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--advertise"):
        members().check(dataclasses.replace(SERVER, address=""))


def test_too_many_members_are_refused_but_a_replacement_is_not() -> None:
    yard = members(members_max=1)
    yard.add(SERVER, 0)
    with pytest.raises(TooLarge, match="1 members already"):
        yard.check(WORKER)
    yard.check(SERVER)


def test_process_at_the_same_address_replaces_only_its_own_role() -> None:
    yard = members()
    server = yard.add(SERVER, 0)
    assert yard.replaced_by(SERVER) is server
    assert yard.replaced_by(dataclasses.replace(AGENT, address=SERVER.address)) is None
    yard.add(WORKER, 0)
    assert yard.replaced_by(WORKER) is None, "workers have no address to share"


def test_another_role_may_not_ask() -> None:
    yard = members()
    server = yard.add(SERVER, 0)
    with pytest.raises(InvalidRequest, match="is for workers only"):
        yard.require(server.incarnation, MemberRole.WORKER)


def test_exit_names_the_workers_of_that_process_that_the_agent_has_started() -> None:
    yard = members()
    agent = yard.add(AGENT, 0)
    by_it = dataclasses.replace(WORKER, agent=agent.incarnation)
    here = yard.add(by_it, 0)
    in_a_container = yard.add(dataclasses.replace(by_it, host="other"), 0)
    yard.add(dataclasses.replace(by_it, pid=99), 0)
    of_nobody = yard.add(WORKER, 0)
    yard.add(dataclasses.replace(WORKER, host="other"), 0)
    assert yard.started_by(agent, pid=7) == (here, in_a_container, of_nobody)
    agent.registration = dataclasses.replace(AGENT, principal="agent/a")
    assert yard.started_by(agent, pid=7) == (here, in_a_container)


def test_exit_is_taken_from_the_agent_that_has_registered_again_and_from_no_other() -> None:
    """S2: an agent says of itself on which host it runs, and may lie."""
    yard = members()
    first = yard.add(dataclasses.replace(AGENT, address="box:1", principal="agent/a"), 0)
    worker = yard.add(dataclasses.replace(WORKER, agent=first.incarnation), 0)
    liar = yard.add(dataclasses.replace(AGENT, address="box:2", principal="agent/b"), 0)
    again = yard.add(dataclasses.replace(AGENT, address="box:3", principal="agent/a"), 0)
    assert yard.started_by(liar, pid=7) == ()
    assert yard.started_by(again, pid=7) == (), "the first is still there"
    yard.remove(first.incarnation, "was silent")
    assert yard.started_by(liar, pid=7) == ()
    assert yard.started_by(again, pid=7) == (worker,)
