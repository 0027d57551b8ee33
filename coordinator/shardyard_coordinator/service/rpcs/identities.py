"""RPCs by which processes get certificates."""

from __future__ import annotations

import logging
import secrets
from typing import Final

from shardyard.domain.errors import InvalidRequest, NotFound, NotPermitted, StorageUnavailable
from shardyard.security.authority import requested_key
from shardyard.security.identity import SCHEME, Identity, Role, checked_name
from shardyard.security.issuing import lifetime_of
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_coordinator.service.rpcs.rpc import Backend, identified

log = logging.getLogger("shardyard.coordinator")

OWNED: Final = (Role.WORKER, Role.READER, Role.OPERATOR, Role.VIEWER)
"""Roles that may belong to an owner. Servers and agents serve all jobs."""
OVERLAP_MAX_S: Final = 30 * 86_400
WAITS_SHOWN_MAX: Final = 64


def _enrol(backend: Backend, request: wire.EnrolRequest, caller: Identity | None) -> wire.EnrolReply:
    identities, caller = _known(backend, caller)
    key = requested_key(request.request)
    role, name, owner = _subject(identities, request, caller)
    certificate, authorities = identities.authority.issue(role, name, key, lifetime_of(role), owner)
    return wire.EnrolReply(certificate=certificate, authorities=authorities, role=role.value, name=name)


def _subject(identities: YardIdentities, request: wire.EnrolRequest, caller: Identity) -> tuple[Role, str, str]:
    """Whom the certificate is to be for: role, name and owner. Raises NotPermitted, NotTrusted, InvalidRequest,
    StorageUnavailable."""
    if request.launch:
        if caller.role is not Role.AGENT:
            raise NotPermitted(f"{caller} launches nothing", todo="")
        try:
            owner = checked_name(request.owner) if request.owner else ""
            return Role.WORKER, checked_name(f"{caller.name}.{request.launch}"), owner
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
    if caller.role is not Role.INVITED:
        return caller.role, caller.name, caller.owner
    try:
        invitation = identities.invitations.use(caller.name)
    except OSError as error:
        raise StorageUnavailable(f"the use of invitation {caller.name} cannot be recorded: {error.strerror}") from error
    name = invitation.name or f"{invitation.role}-{secrets.token_hex(4)}"
    return Role(invitation.role), name, invitation.owner


def _invite(backend: Backend, request: wire.InviteRequest, caller: Identity | None) -> wire.InviteReply:
    identities, caller = _known(backend, caller)
    try:
        role = Role(request.role)
    except ValueError:
        raise InvalidRequest(f"{request.role[:64]!r} is no role") from None
    owner = request.owner or caller.owner
    if not caller.may_touch(owner) or (caller.owner and role not in OWNED):
        raise NotPermitted(f"{caller} invites nobody as {role.value}{f' of {owner}' * bool(owner)}", todo="")
    if owner and role not in OWNED:
        raise InvalidRequest(f"a {role.value} has no owner: it serves all jobs")
    try:
        made = identities.invitations.add(
            role, request.name, request.key, request.lifetime_s, request.uses, owner=owner
        )
    except OSError as error:
        raise StorageUnavailable(f"the invitation cannot be recorded: {error.strerror}") from error
    return wire.InviteReply(id=made.id, yard=identities.authority.yard, authority=identities.point)


def _known(backend: Backend, caller: Identity | None) -> tuple[YardIdentities, Identity]:
    if backend.identities is None or caller is None:
        raise NotFound("this yard signs no certificates", why="it has none, or has them from elsewhere", todo="")
    return backend.identities, caller


def _list(backend: Backend, _: wire.ListIdentitiesRequest, caller: Identity | None) -> wire.ListIdentitiesReply:
    identities, caller = _known(backend, caller)
    revoked = identities.revocations.holders
    reply = wire.ListIdentitiesReply()
    for each in identities.authority.issued():
        if caller.may_touch(_held(identities, each.holder).owner):
            reply.identities.add(
                holder=each.holder,
                serial=each.serial,
                issued_s=each.issued_s,
                until_s=each.until_s,
                revoked=each.holder in revoked,
            )
    rotation = identities.authority.rotation
    if rotation is not None:
        with backend.mailbox.machine() as machine:
            members = machine.members
        reply.rotation.phase = rotation.phase.value
        reply.rotation.since_s, reply.rotation.overlap_s = int(rotation.since_s), int(rotation.overlap_s)
        reply.rotation.waits_for.extend(identities.waits_for(members)[:WAITS_SHOWN_MAX])
    return reply


def _revoke(backend: Backend, request: wire.RevokeIdentityRequest, caller: Identity | None) -> wire.RevokeIdentityReply:
    identities, caller = _known(backend, caller)
    try:
        held = _held(identities, request.holder)
        if not caller.may_touch(held.owner):
            raise NotPermitted(f"{caller} decides nothing about {held}", todo="")
        identities.revoke(held, revoked=not request.allow)
    except ValueError as error:
        raise InvalidRequest(f"no identity: {error}") from error
    except OSError as error:
        raise StorageUnavailable(f"the revocation cannot be recorded: {error.strerror}") from error
    log.warning("%s has %s %s", caller, "allowed" if request.allow else "revoked", held)
    return wire.RevokeIdentityReply()


def _rotate(
    backend: Backend, request: wire.RotateAuthorityRequest, caller: Identity | None
) -> wire.RotateAuthorityReply:
    identities, caller = _known(backend, caller)
    if caller.owner:
        raise NotPermitted(f"{caller} decides nothing about the yard's authority", todo="")
    if request.overlap_s > OVERLAP_MAX_S:
        raise InvalidRequest(f"an overlap of {request.overlap_s} s; at most {OVERLAP_MAX_S} s are taken")
    try:
        if request.next:
            identities.end_phase()
        else:
            identities.rotate(request.overlap_s)
    except OSError as error:
        raise StorageUnavailable(f"the rotation cannot be recorded: {error.strerror}") from error
    log.warning("%s rotates the yard's authority", caller)
    rotation = identities.authority.rotation
    return wire.RotateAuthorityReply(phase="" if rotation is None else rotation.phase.value)


def _held(identities: YardIdentities, holder: str) -> Identity:
    """Raises ValueError."""
    return Identity.parse(f"{SCHEME}{identities.authority.yard}/{holder}")


RPCS = (
    identified(methods.ENROL, _enrol),
    identified(methods.INVITE, _invite),
    identified(methods.LIST_IDENTITIES, _list),
    identified(methods.REVOKE_IDENTITY, _revoke),
    identified(methods.ROTATE_AUTHORITY, _rotate),
)
