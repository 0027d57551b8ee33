"""`shardyard audit`: the history of a job, from its coordinator, or from the state folder if no coordinator runs.

Owns: the shape of the lines. It is a promise to scripts: names stay, new ones may come. Invariants: memory does not
grow with the audit. The output file is complete, or does not exist. Must not know: what the entries mean beyond their
names.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from shardyard_launcher.terminal.options import ADDRESS, load_given, settings_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.interfaces import Network

TIMEOUT_MS: Final = 30_000
COLUMNS: Final = (
    "number",
    "time",
    "term",
    "job",
    "event",
    "worker",
    "feed",
    "epoch",
    "index",
    "rank",
    "token",
    "first",
    "next",
    "done",
    "sequence",
    "how",
)
"""Of the CSV; what else an entry has stands in a last column, `more`, as JSON."""
_IDS: Final = ("worker", "incarnation", "agent")


@click.command()
@click.argument("job")
@click.option("--format", "form", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to this file (default: standard output).",
)
@click.option(
    "--coordinator", metavar=ADDRESS, help="The coordinator's address (default: that of the yard of `shardyard up`)."
)
@click.option("--state", metavar="DIR", help="State folder of a yard or a coordinator (default: yard.state).")
@settings_options
def audit(
    job: str,
    form: str,
    output: Path | None,
    coordinator: str | None,
    state: str | None,
    config: str | None,
    sets: tuple[str, ...],
) -> int:
    """Write the history of a job: which worker did which work, and what was lost or restored.

    JOB is a name (its latest run) or an id. The history comes from the coordinator, or, if none runs, from its journal
    in the state folder.
    """
    settings = load_given(config, sets, {"coordinator": coordinator, "yard.state": state}).loaded.settings
    entries = read(settings, job)
    with _opened(output) as file:
        write = _write_csv if form == "csv" else _write_jsonl
        write(entries, file)
    return 0


def read(settings: Settings, job: str) -> Iterator[Mapping[str, Any]]:
    """The audit, one entry at a time. Raises NotFound, CoordinatorUnavailable, ConfigurationError before the first
    entry."""
    from shardyard.domain.errors import CoordinatorUnavailable
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard_launcher.yard.state_file import read_state

    folder = Path(settings.yard.state)
    if settings.coordinator:
        return _begun(ask(GrpcNetwork(), settings.coordinator, job))
    yard = read_state(folder)
    address = yard.address_of("coordinator") if yard else ""
    if address:
        try:
            return _begun(ask(GrpcNetwork(), address, job))
        except CoordinatorUnavailable:
            click.echo(f"note: the coordinator at {address} does not answer; this is what it has written", err=True)
    return _begun(_look_up(folder, job))


def _begun(entries: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The same entries. Errors that come with the first one are raised here."""
    return itertools.chain(list(itertools.islice(entries, 1)), entries)


def ask(network: Network, coordinator: str, job: str) -> Iterator[Mapping[str, Any]]:
    """The audit of a running coordinator. Raises CoordinatorUnavailable, NotFound, ConfigurationError."""
    from shardyard.domain import errors
    from shardyard.domain.ids import JobId
    from shardyard.runtime.waits import WaitRegistry
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire

    peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    wanted, after, more = job, 0, True
    wait_registry = WaitRegistry()
    try:
        while more:
            request = wire.ReadAuditRequest(job=wanted, after=after)
            with wait_registry.over(lambda: f"the {peer.name} to read its audit"):
                reply = peer.call(methods.READ_AUDIT, request, timeout_ms=TIMEOUT_MS)
            if not after:
                _tell_lost(reply.lost)
            for each in reply.entries:
                yield _line(each.number, each.time, each.term, each.job, each.event, json.loads(each.body_json))
            wanted, after, more = str(JobId(reply.job)), reply.reached, reply.more
    finally:
        wait_registry.close()
        peer.close()


def _look_up(folder: Path, job: str) -> Iterator[Mapping[str, Any]]:
    from shardyard_coordinator.service.journal import FILE, find_audited_job, read_audit
    from shardyard_launcher.yard.state_file import JOURNAL

    if not (folder / FILE).exists() and (folder / JOURNAL / FILE).exists():
        folder = folder / JOURNAL
    number, after, more = find_audited_job(folder, job), 0, True
    while more:
        page = read_audit(folder, number, after)
        if not after:
            _tell_lost(page.lost)
        for each in page.entries:
            yield _line(each.number, each.time, each.term, each.job, each.kind, each.body)
        after, more = page.reached, page.more


def _tell_lost(number: int) -> None:
    if number:
        click.echo(f"note: the audit was longer; entries up to number {number} were given up for newer ones", err=True)


def _line(number: int, at: float, term: int, job: int, event: str, body: Mapping[str, Any]) -> dict[str, Any]:
    from shardyard.domain.ids import Incarnation, JobId

    time = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    said = {key: str(Incarnation(value)) if key in _IDS and value else value for key, value in body.items()}
    return {"number": number, "time": time, "term": term, "job": str(JobId(job)) if job else "", "event": event, **said}


def _write_jsonl(entries: Iterator[Mapping[str, Any]], file: IO[str]) -> None:
    for entry in entries:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def _write_csv(entries: Iterator[Mapping[str, Any]], file: IO[str]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, "more"])
    for entry in entries:
        more = {name: value for name, value in entry.items() if name not in COLUMNS}
        cells = ["" if entry.get(name) is None else entry[name] for name in COLUMNS]
        writer.writerow([*cells, json.dumps(more, separators=(",", ":")) if more else ""])


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    """Raises StorageUnavailable."""
    from shardyard.domain.errors import StorageUnavailable

    if output is None:
        yield sys.stdout
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except OSError as error:
        raise StorageUnavailable(
            f"cannot write {output}: {error}", todo="make room there, or give another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
