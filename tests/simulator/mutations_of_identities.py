"""Mutations of promise S2: a member speaks for itself and its own job, and for nobody else."""

from __future__ import annotations

from shardyard.security import door
from shardyard.security.identity import Role
from shardyard.security.passes import Speaker
from shardyard_coordinator.service.rpcs import members
from shardyard_coordinator.service.rpcs.rpc import Backend

from .mutation import Patch, mutation


@mutation("S2", "async-stolen")
def registrations_are_bound_to_nobody(patch: Patch) -> None:
    """the coordinator does not compare who calls with who has registered"""
    real = members.register_event
    patch.setattr(Backend, "check_caller", lambda self, request, caller: None)
    patch.setattr(members, "register_event", lambda request, caller=None: real(request))


@mutation("S2", "async-stolen")
def any_pass_is_for_every_member(patch: Patch) -> None:
    """servers do not compare requests with passes"""
    patch.setattr(Speaker, "check", lambda self, job, incarnation: None)


@mutation("S2", "async-stolen")
def every_role_may_call_everything(patch: Patch) -> None:
    """the table of roles is not looked at"""
    patch.setattr(door, "ALLOWED", dict.fromkeys(door.ALLOWED, frozenset(Role)))
