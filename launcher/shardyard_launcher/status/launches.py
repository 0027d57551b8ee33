"""The launches of a yard's agents, as `shardyard status` shows them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from shardyard.domain.ids import Incarnation
from shardyard_launcher.scripts.launches import FoundLaunch
from shardyard_launcher.terminal.quantities import describe_duration
from shardyard_launcher.terminal.tables import new_table
from shardyard_worker.agent.supervision import describe_end

ENDED_SHOWN_MAX: Final = 5


def launches_table(launches: list[FoundLaunch]) -> RenderableType | None:
    """All that run, and the latest that have ended; None if there are none."""
    if not launches:
        return None
    now_s = time.time()
    table = new_table("launch", "script", "agent", "host", "processes", "started", "state")
    running = [each for each in launches if each.runs]
    for each in [*running, *[each for each in launches if not each.runs][:ENDED_SHOWN_MAX]]:
        said = each.described
        cells = [
            str(each.number),
            Path(said.script).name,
            str(Incarnation(each.agent.incarnation)),
            each.agent.host,
            f"{said.running} of {said.workers}" if each.runs else str(said.workers),
            f"{_ago(each.started_s, now_s)} ago",
            describe_state(each, now_s),
        ]
        table.add_row(*map(Text, cells))
    return table


def describe_state(launch: FoundLaunch, now_s: float) -> str:
    """For example `runs`, `ended well 5 s ago`, `process 1 failed first, with exit code 3, 2 min 4 s ago`."""
    said = launch.described
    if launch.runs:
        return "runs"
    if not said.HasField("ending"):
        return "ended with its agent"
    ago = f"{_ago(launch.ended_s, now_s)} ago"
    if said.ending.stopped:
        return f"was stopped {ago}"
    if not said.ending.exit_code:
        return f"ended well {ago}"
    return f"process {said.ending.first_error_index} {describe_end(said.ending.exit_code, None)} {ago}"


def launch_as_json(launch: FoundLaunch) -> dict[str, object]:
    said = launch.described
    ended = said.HasField("ending")
    return {
        "launch": launch.number,
        "script": said.script,
        "agent": launch.agent.incarnation,
        "host": launch.agent.host,
        "running": launch.runs,
        "processes": said.workers,
        "processes_running": said.running,
        "started_s": launch.started_s,
        "ended_s": launch.ended_s or None,
        "stopped": said.ending.stopped,
        "exit_code": said.ending.exit_code if ended else None,
        "first_error_process": said.ending.first_error_index if ended and said.ending.exit_code else None,
        "first_error": (said.ending.first_error or None) if ended else None,
    }


def _ago(then_s: float, now_s: float) -> str:
    return describe_duration(max(0, int((now_s - then_s) * 1000)))
