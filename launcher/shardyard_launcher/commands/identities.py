"""`shardyard invite`, `join`, `identities`: certificates, for other machines and as a list.

Must not know: what a certificate is, who may have one.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.terminal.options import ADDRESS, load_given, settings_options, state_option, yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.wire.v1 import coordinator_pb2 as wire

ROLES: Final = ("worker", "server", "agent", "reader", "operator", "viewer")
SIGN: Final = "sign"
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LIFETIME: Final = re.compile(r"([0-9]{1,6})([smhd])")


@click.command()
@click.option("--role", type=click.Choice(ROLES), required=True, help="What the process is to be.")
@click.option("--owner", default="", help="Whose jobs it may touch (default: all, or those of your own owner).")
@click.option("--name", default="", help="Its name in the yard (default: each gets one of its own).")
@click.option(
    "--for", "lifetime", default="10m", show_default=True, metavar="TIME", help="How long, as 90s, 10m or 2h."
)
@click.option("--uses", type=click.IntRange(min=1), default=1, show_default=True, help="How many processes may use it.")
@click.option(
    "--as", "address", metavar=ADDRESS, help="The coordinator's address in the line, as other machines know it."
)
@yard_options
def invite(settings: Settings, role: str, name: str, owner: str, lifetime: str, uses: int, address: str | None) -> int:
    """Let a process of another machine join the yard.

    The command prints a line. Run it on the other machine, where it gets a certificate. The line is a secret: whoever
    has it can join in that role.
    """
    from shardyard.transport.enrolment import invite as open_invitation
    from shardyard_launcher.yard.running_yard import connect_to_yard

    lifetime_s = parse_lifetime(lifetime)
    with connect_to_yard(settings) as client:
        text = open_invitation(client.peer, role=role, name=name, lifetime_s=lifetime_s, uses=uses, owner=owner)
        where = address or client.address
    click.echo(f"shardyard join {where} {text}")
    times = "once" if uses == 1 else f"{uses} times"
    click.echo(f"it can be used {times}, within {lifetime}, for the role {role}", err=True)
    return 0


@click.command()
@state_option
@settings_options
@click.argument("address", metavar=ADDRESS)
@click.argument("invitation")
def join(address: str, invitation: str, state: str | None, config: str | None, sets: tuple[str, ...]) -> int:
    """Get a certificate for a yard, with the line that `shardyard invite` has printed there.

    The INVITATION is a secret, and other users of this machine see arguments while a command runs. With - it is read
    from standard input.
    """
    from shardyard.security.local import folder_of, remember_yard
    from shardyard.transport.enrolment import join as enrol
    from shardyard.transport.enrolment import keep_credentials

    settings = load_given(config, sets, {"yard.state": state, "coordinator": address}).loaded.settings
    text = sys.stdin.readline().strip() if invitation == "-" else invitation
    pem, role, name = enrol(address, text)
    folder = keep_credentials(folder_of(Path(settings.yard.state), role), pem)
    remember_yard(address, folder.parent)
    click.echo(f"joined the yard at {address} as {role} {name}; the certificate is in {folder}")
    return 0


@click.group()
def identities() -> None:
    """Show, renew and revoke certificates of a yard, and replace its authority."""


@identities.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@yard_options
def list_command(settings: Settings, as_json: bool) -> int:
    """List the certificates that the yard has signed and that have not ended."""
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.tables import new_table, show
    from shardyard_launcher.yard.running_yard import connect_to_yard

    with connect_to_yard(settings) as client:
        reply = client.call(methods.LIST_IDENTITIES, wire.ListIdentitiesRequest(), "to list its certificates")
    rotation = reply.rotation if reply.HasField("rotation") else None
    if as_json:
        names = ("holder", "serial", "issued_s", "until_s", "revoked")
        listed = [{name: getattr(each, name) for name in names} for each in reply.identities]
        click.echo(json.dumps({"identities": listed, "rotation": _rotation(rotation)}, indent=2))
        return 0
    if rotation is not None:
        click.echo(f"the authority is being rotated: phase {rotation.phase}, since {_moment(rotation.since_s)}")
        if rotation.phase == SIGN:
            retired_s = rotation.since_s + rotation.overlap_s
            click.echo(f"the former authority is trusted until {_moment(retired_s)} at least")
        for member in rotation.waits_for:
            click.echo(f"it waits for {member}")
    table = new_table("holder", "issued", "until", "serial", "")
    for each in reply.identities:
        times = (_moment(each.issued_s), _moment(each.until_s))
        table.add_row(each.holder, *times, each.serial[:16], "revoked" if each.revoked else "")
    show(table)
    return 0


@identities.command()
@yard_options
def renew(settings: Settings) -> int:
    """Renew the certificate that this command uses, now.

    It is that of an operator or viewer, or the one in the folder that security.identity names.
    """
    from shardyard.transport.enrolment import renew as renew_certificate
    from shardyard_launcher.yard.running_yard import connect_to_yard

    with connect_to_yard(settings) as client:
        credentials = client.peer.credentials
        if credentials is None:
            raise click.UsageError("security.tls is false: there is no certificate")
        renew_certificate(client.peer, credentials)
    click.echo(f"the certificate in {credentials.folder} was renewed")
    return 0


@identities.command()
@click.option(
    "--overlap",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="How long members that are away can come back before the former authority is retired, as 90s, 10m or 2d.",
)
@click.option("--next", "next_", is_flag=True, help="End the present phase, without waiting for overlap and members.")
@yard_options
def rotate(settings: Settings, overlap: str, next_: bool) -> int:
    """Replace the yard's authority while jobs train.

    Members trust the next authority first, then get certificates that it has signed, and then the former one is
    retired. The rotation goes on by itself; `shardyard identities list` shows what it waits for. Members that are away
    until its end must join again, and so must people who have used no `shardyard status` meanwhile.
    """
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.yard.running_yard import connect_to_yard

    request = wire.RotateAuthorityRequest(overlap_s=parse_lifetime(overlap, "--overlap"), next=next_)
    with connect_to_yard(settings) as client:
        reply = client.call(methods.ROTATE_AUTHORITY, request, "to rotate the authority")
    click.echo(f"phase {reply.phase} has begun" if reply.phase else "the former authority is retired")
    return 0


@identities.command()
@click.argument("holder")
@yard_options
def revoke(settings: Settings, holder: str) -> int:
    """Refuse the certificates of a member from now on, those of open connections too.

    HOLDER is a role and a name, as `shardyard identities list` shows them, such as worker/gamma.8f2c77aa.
    """
    _revoke(settings, holder, allow=False)
    click.echo(f"certificates of {holder} are refused; servers and agents learn of it with their next heartbeat")
    return 0


@identities.command()
@click.argument("holder")
@yard_options
def allow(settings: Settings, holder: str) -> int:
    """Take a revocation back."""
    _revoke(settings, holder, allow=True)
    click.echo(f"certificates of {holder} are accepted")
    return 0


def _revoke(settings: Settings, holder: str, *, allow: bool) -> None:
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.yard.running_yard import connect_to_yard

    with connect_to_yard(settings) as client:
        request = wire.RevokeIdentityRequest(holder=holder, allow=allow)
        client.call(methods.REVOKE_IDENTITY, request, "to change what it refuses")


def _rotation(rotation: wire.Rotation | None) -> dict[str, object] | None:
    if rotation is None:
        return None
    return {
        "phase": rotation.phase,
        "since_s": rotation.since_s,
        "overlap_s": rotation.overlap_s,
        "waits_for": list(rotation.waits_for),
    }


def _moment(time_s: int) -> str:
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def parse_lifetime(text: str, option: str = "--for") -> int:
    """Seconds. Raises UsageError."""
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise click.UsageError(f"{option} {text}: expected a number with s, m, h or d, such as 10m")
    return int(found[1]) * _UNITS[found[2]]
