"""Which run of which launch this process belongs to, from its environment.

`SHARDYARD_RUN_ID` names the launch. Whoever starts a process again gives it the same id: an agent does so by itself. A
script may train several jobs, one after the other; `SHARDYARD_RUN_NUMBER` counts them in this process. Must not know:
the coordinator, what becomes of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from shardyard.config.configuration import PID_VARIABLE, RUN_ID_VARIABLE, RUN_NUMBER_VARIABLE
from shardyard.domain.ids import RunName


def run_of(environment: Mapping[str, str]) -> RunName | None:
    """None: no launch is known, or another process of it started this one. Nobody starts that one again."""
    launch, number = environment.get(RUN_ID_VARIABLE, ""), environment.get(RUN_NUMBER_VARIABLE, "1")
    here = str(os.getpid())
    if not launch or environment.get(PID_VARIABLE, here) != here:
        return None
    return RunName(launch, int(number) if number.isdigit() else 1)


def end_run(environment: MutableMapping[str, str]) -> None:
    """This process has left the job of its run. If it connects again, that is the launch's next run."""
    run = run_of(environment)
    if run is not None:
        environment[RUN_NUMBER_VARIABLE] = str(run.number + 1)
