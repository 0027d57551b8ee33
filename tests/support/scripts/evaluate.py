"""An evaluating script for tests, of the probe's mode `own`: all values of a version are how often they were pushed.

Prints each version's step and values, reports the step, keeps the newest as the best. With a path it ends itself as
kill -9 does at the second version, the first time.
"""

import os
import signal
import sys
from pathlib import Path

import shardyard as sy


def main() -> None:
    died = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with sy.follow() as run:
        for count, snapshot in enumerate(run.snapshots(every_s=0)):
            found = {value for each in snapshot.state_dict().values() for value in each.tolist()}
            print(f"evaluated {snapshot.step}: {sorted(found)}", flush=True)
            run.report(pushed=max(found))
            run.keep_best("pushed")
            if count == 1 and died is not None and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
