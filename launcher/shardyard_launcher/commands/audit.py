"""`shardyard audit`: the history of a job, from its coordinator, or from the state folder if no coordinator runs.

Owns: the shape of the lines. It is a promise to scripts: names stay, new ones may come. Invariants: memory does not
grow with the audit. The output file is complete, or does not exist. Must not know: what the entries mean beyond their
names.
"""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.interfaces import Network

TIMEOUT_MS: Final = 30_000
LINES_AT_ONCE: Final = 1_000
COLUMNS: Final = (
    *("number", "time", "term", "job", "event", "worker", "feed", "epoch", "index"),
    *("rank", "token", "first", "next", "done", "sequence", "how"),
)
"""The columns of the CSV. The rest of an entry is in a last column, `more`, as JSON."""
_IDS: Final = ("worker", "incarnation", "agent")


@click.command()
@click.argument("job", required=False)
@click.option("--yard", "of_yard", is_flag=True, help="Write the audit of the yard itself instead: who did what to it.")
@click.option("--verify", "only_verify", is_flag=True, help="Check that no line of the yard's audit was changed.")
@click.option("--format", "form", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to this file (default: standard output).",
)
@yard_options
def audit(settings: Settings, job: str | None, of_yard: bool, only_verify: bool, form: str, output: Path | None) -> int:
    """Write the history of a job.

    It says which worker did which work, and what was lost or restored. JOB is a job's name (its latest run) or id. The
    history comes from the coordinator. If none runs, it comes from the coordinator's journal in the state folder.
    """
    from shardyard.storage.storage import write_file

    if of_yard or only_verify:
        return _audit_yard(Path(settings.yard.state), only_verify=only_verify)
    if job is None:
        raise click.UsageError("name a job, or give --yard")
    lines = _csv(read(settings, job)) if form == "csv" else _jsonl(read(settings, job))
    if output is None:
        sys.stdout.writelines(lines)
    else:
        write_file(output, iter(lambda: "".join(itertools.islice(lines, LINES_AT_ONCE)).encode(), b""))
    return 0


def _audit_yard(state: Path, *, only_verify: bool) -> int:
    """Shows or checks the audit in a state folder of this machine."""
    from shardyard.domain.errors import NotFound
    from shardyard.security import audit_log
    from shardyard.security.local import FOLDER
    from shardyard_launcher.yard.state_file import JOURNAL

    places = [state / JOURNAL / FOLDER / audit_log.FILE, state / FOLDER / audit_log.FILE]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise NotFound(f"there is no audit of a yard in {state}", todo="give the coordinator's folder with --state")
    if only_verify:
        click.echo(f"{path}: {audit_log.verify(path)} lines, each follows the one before it")
        return 0
    for entry in audit_log.read(path):
        click.echo(json.dumps(entry))
    return 0


def read(settings: Settings, job: str) -> Iterator[Mapping[str, Any]]:
    """The audit, one entry at a time. Raises NotFound, CoordinatorUnavailable, ConfigurationError before the first
    entry."""
    from shardyard.domain.errors import CoordinatorUnavailable
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import read_state

    folder = Path(settings.yard.state)
    if settings.coordinator:
        return _begun(ask(network_of(settings), settings.coordinator, job))
    yard = read_state(folder)
    address = yard.coordinator if yard else ""
    if address:
        try:
            return _begun(ask(network_of(settings, coordinator=address), address, job))
        except CoordinatorUnavailable:
            click.echo(f"note: the coordinator at {address} does not answer; this is its journal", err=True)
    return _begun(_look_up(folder, job))


def _begun(entries: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Reads the first entry, so that its errors are raised here. Returns all entries."""
    return itertools.chain(list(itertools.islice(entries, 1)), entries)


def ask(network: Network, coordinator: str, job: str) -> Iterator[Mapping[str, Any]]:
    """The audit of a running coordinator. Raises CoordinatorUnavailable, NotFound, ConfigurationError."""
    from shardyard.domain.ids import JobId
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient

    wanted, after, more = job, 0, True
    with CoordinatorClient(coordinator, network) as client:
        while more:
            request = wire.ReadAuditRequest(job=wanted, after=after)
            reply = client.call(methods.READ_AUDIT, request, "to read its audit", timeout_ms=TIMEOUT_MS)
            if not after:
                _say_lost(reply.lost)
            for each in reply.entries:
                yield _entry(each.number, each.time, each.term, each.job, each.event, json.loads(each.body_json))
            wanted, after, more = str(JobId(reply.job)), reply.reached, reply.more


def _look_up(folder: Path, job: str) -> Iterator[Mapping[str, Any]]:
    """The audit in a coordinator's journal. Raises NotFound, ConfigurationError."""
    from shardyard_coordinator.service.journal import FILE, reading_audit
    from shardyard_launcher.yard.state_file import JOURNAL

    if not (folder / FILE).exists() and (folder / JOURNAL / FILE).exists():
        folder = folder / JOURNAL
    with reading_audit(folder) as audit:
        number, after, more = audit.find_job(job), 0, True
        while more:
            page = audit.read(number, after)
            if not after:
                _say_lost(page.lost)
            for each in page.entries:
                yield _entry(each.number, each.time, each.term, each.job, each.kind, each.body)
            after, more = page.reached, page.more


def _say_lost(number: int) -> None:
    if number:
        click.echo(f"note: the entries up to number {number} were dropped to make room for newer ones", err=True)


def _entry(number: int, at: float, term: int, job: int, event: str, body: Mapping[str, Any]) -> dict[str, Any]:
    from shardyard.domain.ids import Incarnation, JobId

    time = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    shown = {key: str(Incarnation(value)) if key in _IDS and value else value for key, value in body.items()}
    job_id = str(JobId(job)) if job else ""
    return {"number": number, "time": time, "term": term, "job": job_id, "event": event, **shown}


def _jsonl(entries: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    return (json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)


def _csv(entries: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    yield _csv_row([*COLUMNS, "more"])
    for entry in entries:
        more = {name: value for name, value in entry.items() if name not in COLUMNS}
        cells = ["" if entry.get(name) is None else entry[name] for name in COLUMNS]
        yield _csv_row([*cells, json.dumps(more, separators=(",", ":")) if more else ""])


def _csv_row(cells: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
