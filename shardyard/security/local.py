"""Where the processes of this machine find their certificates.

The folder `identity` in a yard's state folder has one folder for each role, and that of the authority. So that a script
finds them from any working directory, the user's own folder has a link to it, by the coordinator's address.

    .shardyard/identity/authority/{ca.key, ca.crt}
    .shardyard/identity/worker/{tls.key, tls.crt, ca.crt}
    ~/.local/state/shardyard/yards/localhost:7070 -> .shardyard/identity

Must not know: how certificates are made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path
from typing import Final

from shardyard.config.settings import AUTO, Settings
from shardyard.domain.errors import NotTrusted
from shardyard.security.credentials import CERTIFICATE, Credentials
from shardyard.security.identity import Role

FOLDER: Final = "identity"
AUTHORITY: Final = "authority"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")  # noqa: S104 - it is looked for, not bound


def find_credentials(
    settings: Settings, *roles: Role, coordinator: str = "", state: Path | None = None
) -> Credentials | None:
    """The credentials of this process: those of the first role that has any here. None: the yard runs without TLS.
    `coordinator` and `state`: the address and the state folder of the yard, if they are others than in the settings.
    Raises NotTrusted if there are none."""
    security, address = settings.security, coordinator or settings.coordinator
    if not security.tls:
        return None
    if security.identity != AUTO:
        return Credentials(Path(security.identity))
    places = [(state or Path(settings.yard.state)).absolute() / FOLDER]
    if address:
        places.insert(0, known_yards() / key_of(address))
    for role in roles:
        for place in places:
            if (place / role.value / CERTIFICATE).is_file():
                return Credentials((place / role.value).resolve())
    raise NotTrusted(
        f"this process has no certificate for the yard{f' at {address}' if address else ''}",
        todo=f"run `shardyard invite --role {roles[0].value}` on a machine of the yard, and on this machine the line "
        f"that it prints; or name the certificate's folder in security.identity. Looked in "
        f"{', '.join(map(str, places))}",
    )


def folder_of(state: Path, role: str) -> Path:
    """Where the processes of a role find their credentials, in a state folder."""
    return (state / FOLDER / role).absolute()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def known_yards() -> Path:
    """The user's folder of links to the identities of yards, by address."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "shardyard" / "yards"


def key_of(address: str) -> str:
    """The name of an address among the known yards. Addresses of this machine's loopback are one."""
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if host in _LOOPBACK or host.startswith("127.") else address.replace("/", "_")


def remember_yard(address: str, identities: Path) -> None:
    """From now on the user's processes find the yard's identities by this address. Does nothing where the user has no
    folder that can be written."""
    link = known_yards() / key_of(address)
    part = link.with_name(f"{link.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.symlink_to(identities.absolute())
        os.replace(part, link)


def forget_yard(address: str, identities: Path) -> None:
    """Removes the link, unless it leads elsewhere by now."""
    link = known_yards() / key_of(address)
    with contextlib.suppress(OSError):
        if link.readlink() == identities.absolute():
            link.unlink()
