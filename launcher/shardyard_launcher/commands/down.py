"""`shardyard down`: ends the yard that `up` started, and deletes what it has left, as far as asked.

Owns: what is asked before checkpoints are deleted, what is deleted, the words printed. Invariants: only processes that
the state file names are ended. Before the first of them is ended, nothing has changed, and the command may be given up.
Checkpoints are deleted only if that was asked for by name. Must not know: how processes are started and watched
(running_yard), how checkpoints are taken (checkpoints.save).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard_launcher.terminal.options import StopSignals, load_given, settings_options, state_option

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard_launcher.checkpoints.kept import KeptJob


@click.command()
@state_option
@click.option("--now", is_flag=True, help="Stop at once, without a checkpoint of the jobs that run.")
@click.option("--purge", is_flag=True, help="Delete logs and journal as well. Checkpoints stay.")
@click.option(
    "--purge-checkpoints",
    is_flag=True,
    help="Delete logs, journal and all checkpoints in the state folder. The command lists the checkpoints and asks.",
)
@click.option("--yes", is_flag=True, help="Do not ask before checkpoints are deleted.")
@settings_options
def down(
    state: str | None,
    now: bool,
    purge: bool,
    purge_checkpoints: bool,
    yes: bool,
    config: str | None,
    sets: tuple[str, ...],
) -> int:
    """Stop the yard that `shardyard up` started.

    A checkpoint of each job that runs is taken first.
    """
    from shardyard_launcher.yard.state_file import locked

    settings = load_given(config, sets, {"yard.state": state}).loaded.settings
    folder = Path(settings.yard.state)
    if not folder.is_dir():
        click.echo(f"no yard is up in {folder}")
        return 0
    with locked(folder):
        if purge_checkpoints and not _may_delete(folder, yes):
            click.echo("nothing was stopped, and nothing was deleted", err=True)
            return 1
        code = _stop(settings, folder, now=now, doomed=purge_checkpoints)
        if code == 0 and (purge or purge_checkpoints):
            click.echo(_purge(folder, checkpoints=purge_checkpoints))
    return code


def _stop(settings: Settings, folder: Path, *, now: bool, doomed: bool) -> int:
    """Ends the folder's yard, if one is up. `doomed`: its checkpoints are deleted after that."""
    from shardyard_launcher.checkpoints.save import save_jobs
    from shardyard_launcher.yard.running_yard import RunningYard
    from shardyard_launcher.yard.state_file import forget_state, read_state
    from shardyard_worker.agent.launch_folders import LaunchFolders

    found = read_state(folder)
    if found is None:
        click.echo(f"no yard is up in {folder}")
        return 0
    yard = RunningYard(settings, folder, found)
    with StopSignals() as signals:
        if not now:
            for line in save_jobs(yard, signals.stop, _checkpoints_in(folder) if doomed else None):
                click.echo(line)
        if signals.exit_code is not None:
            click.echo("given up; the yard is still up. `shardyard down --now` stops it without checkpoints", err=True)
            return signals.exit_code
        # a signal must not leave half of the yard running
        stopped = yard.stop()
        LaunchFolders(folder).forgo_lost()  # the next `up` does not launch them again
        forget_state(folder)
    click.echo(f"stopped {', '.join(map(str, stopped))}")
    return 0


# ---- what is deleted


def _checkpoints_in(folder: Path) -> Path:
    from shardyard.config.settings import CHECKPOINTS
    from shardyard_launcher.yard.state_file import JOURNAL

    return (folder / JOURNAL / CHECKPOINTS).resolve()


def _may_delete(folder: Path, yes: bool) -> bool:
    """Lists the checkpoints in the folder, and asks. Raises InvalidRequest if nobody can be asked."""
    from shardyard.domain.errors import InvalidRequest
    from shardyard_launcher.checkpoints.kept import kept_jobs

    where = _checkpoints_in(folder)
    jobs = kept_jobs(where)
    if not jobs:
        return True
    click.echo("\n".join([f"the checkpoints in {where}:", *(f"  {job}" for job in jobs)]))
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidRequest(
            "--purge-checkpoints deletes these checkpoints, and there is no terminal to ask at",
            why="nothing brings them back",
            todo="add --yes to delete them, or use --purge, which keeps them",
        )
    return click.confirm("delete them?")


def _purge(folder: Path, *, checkpoints: bool) -> str:
    """Deletes what `up` has put into the folder, and the folder if nothing else is in it. Returns what it did, in
    words."""
    from shardyard.config.settings import COLD_FOLDER, WAL_FOLDER
    from shardyard.security.local import FOLDER
    from shardyard_launcher.checkpoints.kept import kept_jobs
    from shardyard_launcher.yard.state_file import JOURNAL, LAUNCHES, LOCK_FILE, LOGS

    saved = _checkpoints_in(folder)
    kept = [] if checkpoints else kept_jobs(saved)
    for name in (LOGS, LAUNCHES, COLD_FOLDER, WAL_FOLDER, FOLDER):  # servers' logs mean nothing without the journal
        shutil.rmtree(folder / name, ignore_errors=True)
    if kept:
        for each in (folder / JOURNAL).iterdir():
            if each.name != saved.name:
                _delete(each)
    else:
        shutil.rmtree(folder / JOURNAL, ignore_errors=True)
    for name in ("settings.yaml", LOCK_FILE):
        (folder / name).unlink(missing_ok=True)
    what = "its logs, journal and checkpoints" if checkpoints else "its logs and journal"
    if not any(folder.iterdir()):
        folder.rmdir()
        return f"deleted {folder} with {what}"
    return f"deleted {what.replace('its', 'the')} in {folder}; {_what_stays(saved, kept)}"


def _what_stays(saved: Path, kept: list[KeptJob]) -> str:
    if not kept:
        return "other files stay there"
    return "\n".join([f"checkpoints stay in {saved}:", *(f"  {job}" for job in kept)])


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
