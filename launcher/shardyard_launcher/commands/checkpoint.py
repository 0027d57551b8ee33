"""`shardyard checkpoint`: takes, lists, verifies, exports, restores and prunes checkpoints.

Owns: what the commands print. The JSON of `list` is a promise to scripts: names stay, new ones may come. Invariant:
only `prune` changes a checkpoint. Must not know: the files of a checkpoint, how models are written (export).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from shardyard_launcher.checkpoints import export as exports
from shardyard_launcher.terminal.options import load_given, settings_options, state_option, yard_options

if TYPE_CHECKING:
    from shardyard.checkpoints.library import CheckpointLibrary, Listed
    from shardyard.config.settings import Settings

RESTORE_TIMEOUT_MS: Final = 600_000
"""So long that every byte of a large checkpoint can be checked."""
F = TypeVar("F", bound=Callable[..., Any])

_job = click.option("--job", metavar="NAME", help="The job's name. Needed if there are checkpoints of several jobs.")
_number = click.option(
    "--number", type=click.IntRange(1), metavar="N", help="The checkpoint's number, as `checkpoint list` shows it."
)
_trust = click.option("--trust", is_flag=True, help="Take checkpoints that the yard has not signed.")


def _storage_options(command: F) -> F:
    """Adds --url, and the settings that locate checkpoints without it. The command gets the `library` there, which
    checks signatures, unless there is no certificate of the yard here, or `_trust` is given."""

    @wraps(command)
    def called(
        *,
        url: str | None,
        state: str | None,
        config: str | None,
        sets: tuple[str, ...],
        trust: bool = False,
        **given: Any,
    ) -> Any:
        from shardyard.checkpoints.library import CheckpointLibrary
        from shardyard.storage.encryption import encrypted, keys_in
        from shardyard.storage.storage import open_storage
        from shardyard_launcher.terminal.yard_network import keys_of_yard
        from shardyard_launcher.yard.state_file import checkpoints_of

        settings = load_given(config, sets, {"yard.state": state}).loaded.settings
        yard = None if trust else keys_of_yard(settings)
        storage = encrypted(open_storage(url or checkpoints_of(settings)), keys_in(settings.storage.key_file))
        return command(library=CheckpointLibrary(storage, yard), **given)

    option = click.option(
        "--url",
        metavar="URL",
        help="Folder or URL of the checkpoints, such as s3://bucket/path (default: job.checkpoint.url, or a folder in"
        " the state folder).",
    )
    return cast(F, option(state_option(settings_options(called))))


@click.group()
def checkpoint() -> None:
    """List, verify, export, take, restore and delete checkpoints."""


@checkpoint.command("list")
@_storage_options
@click.option("--job", metavar="NAME", help="List this job's checkpoints only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(library: CheckpointLibrary, job: str | None, as_json: bool) -> int:
    """List the checkpoints of all jobs, the oldest first."""
    url = library.storage.url
    jobs = library.jobs() if job is None else (job,)
    found = [(name, listed) for name in jobs for listed in library.list_checkpoints(name)]
    best = [entry for entry in (_best_entry(library, name) for name in jobs) if entry is not None]
    if as_json:
        listed = [_entry(name, each) for name, each in found]
        click.echo(json.dumps({"url": url, "checkpoints": listed, "best": best}, indent=2))
        return 0
    if found:
        _show(found)
    for entry in best:
        click.echo(_describe_best(entry))
    if not found and not best:
        click.echo(f"no checkpoints in {url}; --url or --state names another place")
    return 0


@checkpoint.command()
@_storage_options
@_trust
@_job
@_number
def verify(library: CheckpointLibrary, job: str | None, number: int | None) -> int:
    """Check all files of a job's checkpoints.

    Every byte is read, and damaged files are named. The exit status is 1 if a file is damaged, or a checkpoint is not
    signed by the yard.
    """
    name = _the_job(library, job)
    numbers = library.numbers(name)
    findings = library.verify(name, number)
    for finding in findings:
        click.echo(f"checkpoint {finding.number}: {finding.path}: {finding.what}")
    if not numbers:
        click.echo(f"job {name}: no checkpoints")
    elif findings:
        damaged = sorted({finding.number for finding in findings})
        click.echo(f"job {name}: damaged: {', '.join(map(str, damaged))}", err=True)
    else:
        signed = f", signed by {library.yard.yard}" if library.yard is not None else ""
        click.echo(f"job {name}: whole{signed}: {', '.join(map(str, numbers if number is None else (number,)))}")
    return 1 if findings else 0


@checkpoint.command()
@_storage_options
@_trust
@_job
@_number
@click.option(
    "--format",
    "form",
    type=click.Choice(["torch", "safetensors"]),
    default="torch",
    show_default=True,
    help="torch: a state_dict for torch.load(weights_only=True) and model.load_state_dict.",
)
@click.option(
    "--best", "best", is_flag=True, help="Write the best version that an evaluator has kept, instead of a checkpoint."
)
@click.option(
    "--table", metavar="NAME", help="Write only this table's ids and rows. OUT must end with .parquet or .safetensors."
)
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@click.argument("out", type=click.Path(path_type=Path))
def export(
    library: CheckpointLibrary,
    job: str | None,
    number: int | None,
    form: str,
    best: bool,
    table: str | None,
    force: bool,
    out: Path,
) -> int:
    """Write the model of a checkpoint to the file OUT.

    The file has parameters, buffers and tables. The default is the newest checkpoint.
    """
    from shardyard.domain.errors import InvalidRequest

    name = _the_job(library, job)
    if best and number is not None:
        raise InvalidRequest("--best and --number cannot be combined", why="", todo="give one of them")
    if best and table is not None:
        raise InvalidRequest(
            "--best and --table cannot be combined",
            why="the version that an evaluator keeps has no tables",
            todo="give one of them",
        )
    if out.exists() and not force:
        raise InvalidRequest(f"{out} exists already", why="", todo="give another name, or --force")
    if table is not None:
        what = exports.export_table(library, name, number, table, out)
    elif best:
        what = exports.export_best(library, name, form, out)
    else:
        what = exports.export_model(library, name, number, form, out)
    click.echo(f"{out}: {what}")
    return 0


@checkpoint.command()
@click.argument("job", required=False, default="")
@yard_options
def take(settings: Settings, job: str) -> int:
    """Take a checkpoint of a running job now.

    The command waits until the checkpoint is written. JOB is a job's name. Without it, the only job that runs is used.
    """
    from shardyard_launcher.checkpoints.take import take_checkpoint
    from shardyard_launcher.yard.running_yard import connect_to_yard

    with connect_to_yard(settings) as client:
        reply = take_checkpoint(client, job)
    click.echo(f"checkpoint {reply.number} of job {reply.job_name}, step {reply.step:,}, in {reply.url}")
    return 0


@checkpoint.command()
@click.argument("job")
@_number
@click.option(
    "--url", metavar="URL", help="Folder or URL of the checkpoint (default: where the job writes its checkpoints)."
)
@click.option("--cancel", is_flag=True, help="Cancel an earlier `restore` for the next run.")
@_trust
@yard_options
def restore(settings: Settings, job: str, number: int | None, url: str | None, cancel: bool, trust: bool) -> int:
    """Return a job to a checkpoint.

    A running job returns to it now. If the job does not run, its next run starts from the checkpoint. The default is
    the newest checkpoint that is whole. A checkpoint of another yard, or of one without TLS, needs --trust.
    """
    from shardyard.domain.errors import NotReady
    from shardyard.runtime.waits import ExplainedWait
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import ASK_AGAIN_S
    from shardyard_launcher.yard.running_yard import connect_to_yard

    request = wire.RestoreCheckpointRequest(job_name=job, number=number or 0, url=url or "", cancel=cancel, trust=trust)
    what, until = f"to restore job {job}", time.monotonic() + RESTORE_TIMEOUT_MS / 1000
    with connect_to_yard(settings) as client, ExplainedWait(lambda: f"job {job} to go back") as wait:
        while True:
            try:
                reply = client.call(methods.RESTORE_CHECKPOINT, request, what, timeout_ms=RESTORE_TIMEOUT_MS)
                break
            except NotReady:
                if time.monotonic() > until:
                    raise
            wait.tick()
            time.sleep(ASK_AGAIN_S)
    for each in reply.damaged:
        message = f"checkpoint {each} is damaged, or not signed by this yard, and is not used"
        click.echo(f"{message}; see `shardyard checkpoint verify`", err=True)
    if cancel:
        click.echo(f"the next run of job {job} starts from the beginning")
        return 0
    how = "goes back to" if reply.running else "starts its next run from"
    click.echo(f"job {job} {how} checkpoint {reply.number}, step {reply.step:,}, in {reply.url}")
    return 0


@checkpoint.command()
@_storage_options
@_job
@click.option(
    "--keep", type=click.IntRange(2), required=True, help="How many of the newest checkpoints to keep; at least 2."
)
def prune(library: CheckpointLibrary, job: str | None, keep: int) -> int:
    """Delete old and unfinished checkpoints.

    Files that the kept checkpoints need stay.
    """
    name = _the_job(library, job)
    pruned = library.prune(name, keep)
    gone = f"checkpoints {', '.join(map(str, pruned.checkpoints))}" if pruned.checkpoints else "no checkpoint"
    click.echo(f"job {name}: deleted {gone}; {pruned.files} files, {pruned.nbytes:,} bytes")
    return 0


def _the_job(library: CheckpointLibrary, job: str | None) -> str:
    from shardyard.domain.errors import CheckpointNotFound, InvalidRequest

    jobs = library.jobs()
    if job is not None:
        if job not in jobs:
            known = ", ".join(jobs[:10]) or "none"
            raise CheckpointNotFound(
                f"no checkpoints of job {job!r} in {library.storage.url}",
                why=f"jobs with checkpoints there: {known}",
                todo="check --job, or name another place with --url or --state",
            )
        return job
    if not jobs:
        raise CheckpointNotFound(
            f"no checkpoints in {library.storage.url}", why="", todo="name another place with --url or --state"
        )
    if len(jobs) > 1:
        raise InvalidRequest(
            f"{library.storage.url} has checkpoints of {len(jobs)} jobs: {', '.join(jobs[:10])}",
            why="",
            todo="say which with --job",
        )
    return jobs[0]


# ---- list


def _best_entry(library: CheckpointLibrary, job: str) -> dict[str, Any] | None:
    from shardyard.checkpoints.best import BestFolder
    from shardyard.domain.errors import CheckpointDamaged

    folder = BestFolder(library.storage, job)
    try:
        found = folder.load()
    except CheckpointDamaged as error:
        return {"job": job, "damage": error.what}
    if found is None:
        return None
    return {
        "job": job,
        "damage": None,
        **{name: getattr(found, name) for name in ("metric", "mode", "value", "step", "created")},
        "run": int(found.job),
        "bytes": found.written.nbytes,
        "url": folder.url,
    }


def _describe_best(entry: dict[str, Any]) -> str:
    if entry["damage"] is not None:
        return f"best of job {entry['job']}: damaged: {entry['damage']}"
    said = f"{entry['metric']} {entry['value']:.6g} ({entry['mode']}) of step {entry['step']:,}"
    return f"best of job {entry['job']}: {said}, {entry['bytes']:,} bytes; export it with --best"


def _entry(job: str, listed: Listed) -> dict[str, Any]:
    manifest = listed.manifest
    if manifest is None:
        return {"job": job, "number": listed.number, "damage": "" if listed.damage is None else listed.damage.what}
    files = tuple(manifest.files())
    return {
        "job": job,
        "number": listed.number,
        "damage": None,
        "step": manifest.step,
        "mode": manifest.mode.value,
        "created": manifest.created,
        "yard": manifest.yard,
        "signature": listed.signature,
        "partitions": len(manifest.partitions),
        "tables": [
            {
                "name": table.name,
                "dim": table.dim,
                "rows": sum(entry.tables[index].rows for entry in manifest.partitions),
                "bytes": sum(entry.tables[index].nbytes for entry in manifest.partitions),
            }
            for index, table in enumerate(manifest.layout.tables)
        ],
        "files": len(files),
        "bytes": sum(file.written.nbytes for file in files),
        "new_bytes": sum(file.written.nbytes for file in files if file.number == listed.number),
    }


def _signed_by(listed: Listed) -> str:
    """The yard, and whether that was checked."""
    assert listed.manifest is not None
    yard = listed.manifest.yard
    said = {"none": "-", "valid": yard, "wrong": f"{yard} (not valid here)", "unchecked": f"{yard} (not checked)"}
    return said[listed.signature]


def _show(found: list[tuple[str, Listed]]) -> None:
    from shardyard_launcher.terminal.tables import new_table, show

    has_tables = any(listed.manifest is not None and listed.manifest.layout.tables for _, listed in found)
    has_signatures = any(listed.signature != "none" for _, listed in found)
    columns = ["job", "number", "step", "mode", "created", "bytes", "of them new"]
    columns += [*["rows of tables"][:has_tables], *["signed by"][:has_signatures]]
    table = new_table(*columns, "says")
    for job, listed in found:
        entry = _entry(job, listed)
        if listed.manifest is None:
            unknown = ["-"] * (len(columns) - 2)
            table.add_row(job, str(listed.number), *unknown, "its manifest is damaged; see `checkpoint verify`")
            continue
        created = datetime.datetime.fromisoformat(listed.manifest.created).astimezone()
        cells = [job, str(listed.number), f"{listed.manifest.step:,}", listed.manifest.mode.value]
        cells += [created.strftime("%Y-%m-%d %H:%M:%S"), f"{entry['bytes']:,}", f"{entry['new_bytes']:,}"]
        if has_tables:
            cells.append(", ".join(f"{each['name']} {each['rows']:,}" for each in entry["tables"]) or "-")
        if has_signatures:
            cells.append(_signed_by(listed))
        table.add_row(*cells, "")
    show(table)
