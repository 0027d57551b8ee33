"""Runs a script as `python SCRIPT` would, under the contract with the process that started it.

    python -u -P -m shardyard_worker.agent.bootstrap PARENT_PID SCRIPT [ARGUMENT...]

The agent's fork server calls `run` in each process that it forks; `shardyard eval` starts this module as a program.

Owns: two promises. The process dies with its parent, however that ends. An exception that the script does not catch is
written first of all into the file that SHARDYARD_ERROR_FILE names, as JSON {time, type, message, traceback,
new_process_helps}. Everything else is as under plain Python: `sys.argv`, `sys.path[0]`, `__main__`, exit codes, the
printed traceback, children that multiprocessing spawns. Only a worker that was told to leave has exit code 143 also
if its script just ends. Must not know: anything but the standard library, so that it costs nothing and cannot fail
because of other code.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import io
import json
import os
import signal
import sys
import time
import traceback
import types

ERROR_FILE_VARIABLE = "SHARDYARD_ERROR_FILE"
TRACEBACK_CHARACTERS_MAX = 64 * 1024
MESSAGE_CHARACTERS_MAX = 4_096
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """From now on the kernel sends this process `number` when the thread that started it ends. Exits at once if the
    parent is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(128 + number)


def run_script(script: str, arguments: list[str]) -> None:
    """Runs the file as the module `__main__`. Its exceptions, SystemExit too, pass through."""
    # this module stays (unlike runpy's), so threads, atexit functions and late children still find it as __main__
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = None
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    sys.modules["__main__"] = main
    with io.open_code(script) as stream:
        source = stream.read()
    exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - that is its work


def record(error: BaseException, shown: types.TracebackType | None) -> None:
    """Writes the error file. A folder that is gone or full must not hide the error itself."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    text = "".join(traceback.format_exception(type(error), error, shown))
    entry = {
        "time": time.time(),
        "type": type(error).__name__,
        "message": _text(error)[:MESSAGE_CHARACTERS_MAX],
        "traceback": text[-TRACEBACK_CHARACTERS_MAX:],
        # an attribute of the yard's errors (shardyard/domain/errors.py), which this file cannot import
        "new_process_helps": getattr(error, "new_process_helps", False) is True,
    }
    try:
        with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as stream:
            json.dump(entry, stream)
        os.replace(path + ".part", path)
    except OSError as failed:
        sys.stderr.write(f"cannot write {path}: {failed}\n")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - a script's own __str__ may do anything
        return f"<no text: {type(failed).__name__}>"


def run(script: str, arguments: list[str]) -> None:
    """Runs the script, and writes an exception that it does not catch into the error file."""
    # processes that the script starts have other ids: nobody starts them again
    os.environ["SHARDYARD_PID"] = str(os.getpid())
    try:
        run_script(script, arguments)
        drain = sys.modules.get("shardyard_worker.session.drain")
        if drain is not None:  # there if the script has joined a job
            drain.end_script()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this process
        # without the frames of this file, if the error came from the script
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        record(error, shown)
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    run(sys.argv[2], sys.argv[3:])


if __name__ == "__main__":
    main()
