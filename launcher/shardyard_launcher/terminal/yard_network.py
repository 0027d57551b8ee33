"""How a command reaches a yard, and checks its signatures: with the certificate of an operator, or of a viewer if there
is no other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shardyard.config.settings import Settings
from shardyard.domain.errors import NotTrusted
from shardyard.security.identity import Role
from shardyard.security.local import find_credentials
from shardyard.security.signatures import YardKeys, keys_of
from shardyard.transport.enrolment import why_missing
from shardyard.transport.grpc_client import GrpcNetwork

ROLES: Final = (Role.OPERATOR, Role.VIEWER)


def network_of(settings: Settings, *, coordinator: str = "", state: Path | None = None) -> GrpcNetwork:
    """`coordinator`, `state`: of the yard, if they are others than in the settings. Raises NotTrusted,
    CoordinatorUnavailable."""
    try:
        return GrpcNetwork(find_credentials(settings, *ROLES, coordinator=coordinator, state=state))
    except NotTrusted as error:
        raise why_missing(error, coordinator or settings.coordinator) from None


def keys_of_yard(settings: Settings) -> YardKeys | None:
    """The keys with which the yard signs. None if there is no certificate of a yard here."""
    try:
        credentials = find_credentials(settings, *ROLES, Role.READER, Role.WORKER)
    except NotTrusted:
        return None
    return None if credentials is None else keys_of(credentials.pem)
