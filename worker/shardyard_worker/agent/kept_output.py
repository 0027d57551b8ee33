"""What a launch's processes print, and how they fare, on its way into the files of the launch.

Owns: which events are kept, and in which words. Invariant: a disk that refuses output is reported once, and costs the
launch nothing. Must not know: processes, gRPC.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.error_report import message_of
from shardyard_worker.agent.output_files import Kind, OutputFile

log = logging.getLogger("shardyard.agent")


class KeptOutput:
    """For the launch's thread."""

    def __init__(self, number: int, folder: Path, workers: int) -> None:
        self._number = number
        self._folder = folder
        self._files = [OutputFile(folder, index) for index in range(workers)]
        self._added: set[int] = set()
        self._now_s = 0.0
        self._refused = False

    def add(self, event: wire.LaunchEvent) -> None:
        """The event is kept by the next `flush`."""
        match event.WhichOneof("event"):
            case "output":
                said = event.output
                self._add(said.local_index, "err" if said.standard_error else "out", said.line)
            case "started":
                begun = event.started
                again = f", restart {begun.restarts}" if begun.restarts else ""
                self._add(begun.local_index, "agt", f"process {begun.local_index} started with pid {begun.pid}{again}")
            case "exited":
                gone = event.exited
                then = "; it is started again" if gone.will_restart else ""
                self._add(gone.local_index, "agt", f"process {gone.local_index} (pid {gone.pid}) {gone.ending}{then}")
            case "ended":
                self._add(event.ended.first_error_index, "agt", _describe_end(event.ended))

    def say(self, text: str) -> None:
        """What the agent says of the launch."""
        self._add(0, "agt", text)

    def flush(self) -> None:
        for index in sorted(self._added):
            error = self._files[index].flush()
            if error is not None and not self._refused:
                self._refused = True
                log.error(
                    "launch %d: output is not kept (%s); the launch goes on; its folder is %s",
                    *(self._number, error.strerror, self._folder),
                )
        self._added.clear()

    def close(self) -> None:
        self.flush()
        for file in self._files:
            file.close()

    def _add(self, index: int, kind: Kind, text: str) -> None:
        if not self._added:  # what is read at one time has one time
            self._now_s = time.time()
        self._files[index].add(kind, text, self._now_s)
        self._added.add(index)


def _describe_end(ended: wire.LaunchEnded) -> str:
    if ended.stopped:
        return "the launch was stopped"
    if not ended.exit_code:
        return "the launch has ended well"
    why = " ".join(message_of(ended.first_error.splitlines()) or ["no error is known"])
    return f"the launch has failed: {why}"
