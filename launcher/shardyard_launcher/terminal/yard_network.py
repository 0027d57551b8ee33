"""How a command reaches a yard: with the certificate of an operator, or of a viewer if there is no other."""

from __future__ import annotations

from pathlib import Path

from shardyard.config.settings import Settings
from shardyard.domain.errors import NotTrusted
from shardyard.security.identity import Role
from shardyard.security.local import find_credentials
from shardyard.transport.enrolment import why_missing
from shardyard.transport.grpc_client import GrpcNetwork


def network_of(settings: Settings, *, coordinator: str = "", state: Path | None = None) -> GrpcNetwork:
    """`coordinator`, `state`: of the yard, if they are others than in the settings. Raises NotTrusted,
    CoordinatorUnavailable."""
    try:
        roles = (Role.OPERATOR, Role.VIEWER)
        return GrpcNetwork(find_credentials(settings, *roles, coordinator=coordinator, state=state))
    except NotTrusted as error:
        raise why_missing(error, coordinator or settings.coordinator) from None
