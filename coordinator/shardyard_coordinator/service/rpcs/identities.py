"""RPCs by which processes get certificates."""

from __future__ import annotations

import logging
import secrets

from shardyard.domain.errors import InvalidRequest, NotFound, NotPermitted, StorageUnavailable
from shardyard.security.authority import Authority, requested_key
from shardyard.security.identity import Identity, Role, checked_name
from shardyard.security.issuing import lifetime_of
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_coordinator.service.rpcs.rpc import Backend, identified

log = logging.getLogger("shardyard.coordinator")


def _enrol(backend: Backend, request: wire.EnrolRequest, caller: Identity | None) -> wire.EnrolReply:
    identities, caller = _known(backend, caller)
    key = requested_key(request.request)
    role, name = _subject(identities, request.launch, caller)
    return _reply(identities.authority, role, name, identities.authority.issue(role, name, key, lifetime_of(role)))


def _subject(identities: YardIdentities, launch: str, caller: Identity) -> tuple[Role, str]:
    """Whom the certificate is to be for. Raises NotPermitted, NotTrusted, InvalidRequest, StorageUnavailable."""
    if launch:
        if caller.role is not Role.AGENT:
            raise NotPermitted(f"{caller} launches nothing", todo="")
        try:
            return Role.WORKER, checked_name(f"{caller.name}.{launch}")
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
    if caller.role is not Role.INVITED:
        return caller.role, caller.name
    try:
        invitation = identities.invitations.use(caller.name)
    except OSError as error:
        raise StorageUnavailable(f"the use of invitation {caller.name} cannot be recorded: {error.strerror}") from error
    return Role(invitation.role), invitation.name or f"{invitation.role}-{secrets.token_hex(4)}"


def _reply(authority: Authority, role: Role, name: str, certificate: bytes) -> wire.EnrolReply:
    return wire.EnrolReply(certificate=certificate, authorities=authority.certificate, role=role.value, name=name)


def _invite(backend: Backend, request: wire.InviteRequest, caller: Identity | None) -> wire.InviteReply:
    identities, _ = _known(backend, caller)
    try:
        role = Role(request.role)
    except ValueError:
        raise InvalidRequest(f"{request.role[:64]!r} is no role") from None
    try:
        made = identities.invitations.add(role, request.name, request.key, request.lifetime_s, request.uses)
    except OSError as error:
        raise StorageUnavailable(f"the invitation cannot be recorded: {error.strerror}") from error
    return wire.InviteReply(id=made.id, yard=identities.authority.yard, authority=identities.point)


def _known(backend: Backend, caller: Identity | None) -> tuple[YardIdentities, Identity]:
    if backend.identities is None or caller is None:
        raise NotFound("this yard signs no certificates", why="it has none, or has them from elsewhere", todo="")
    return backend.identities, caller


def _list(backend: Backend, _: wire.ListIdentitiesRequest, caller: Identity | None) -> wire.ListIdentitiesReply:
    identities, _caller = _known(backend, caller)
    revoked = identities.revocations.holders
    reply = wire.ListIdentitiesReply()
    for each in identities.authority.issued():
        reply.identities.add(
            role=each.role,
            name=each.name,
            serial=each.serial,
            issued_s=each.issued_s,
            until_s=each.until_s,
            revoked=f"{each.role}/{each.name}" in revoked,
        )
    return reply


def _revoke(backend: Backend, request: wire.RevokeIdentityRequest, caller: Identity | None) -> wire.RevokeIdentityReply:
    identities, caller = _known(backend, caller)
    try:
        role, name = Role(request.role), checked_name(request.name)
        identities.revoke(role, name, revoked=not request.allow)
    except ValueError as error:
        raise InvalidRequest(f"no identity: {error}") from error
    except OSError as error:
        raise StorageUnavailable(f"the revocation cannot be recorded: {error.strerror}") from error
    log.warning("%s has %s %s %s", caller, "allowed" if request.allow else "revoked", role.value, name)
    return wire.RevokeIdentityReply()


RPCS = (
    identified(methods.ENROL, _enrol),
    identified(methods.INVITE, _invite),
    identified(methods.LIST_IDENTITIES, _list),
    identified(methods.REVOKE_IDENTITY, _revoke),
)
