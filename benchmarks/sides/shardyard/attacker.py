"""A process that attacks ports of a yard while it is told to, and says what it used of the processor. It gives way to
all others (nice 19). It can use as much without an attack, for comparison."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.attacks.attacks import ATTACKS, PAUSE_S, Steps, Victim, carry_out
from harness.processes.answers import Conversation

NICE = 19


def main() -> None:
    conversation = Conversation()
    parser = argparse.ArgumentParser()
    parser.add_argument("--identity", type=Path, required=True, help="folder of the certificate that was stolen")
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--coordinator", required=True)
    options = parser.parse_args()
    os.nice(NICE)
    victims = [Victim(address, "ParameterServer", options.identity) for address in options.servers]
    victims.append(Victim(options.coordinator, "Coordinator", options.identity))
    stop = threading.Event()
    threads: list[threading.Thread] = []
    begun = [0.0, 0.0]

    def begin(work: Callable[[Victim], Steps]) -> dict[str, Any]:
        stop.clear()
        begun[:] = [time.process_time(), time.monotonic()]
        threads[:] = [threading.Thread(target=carry_out, args=(work, each, stop)) for each in victims]
        for thread in threads:
            thread.start()
        return {}

    def attack(name: str) -> dict[str, Any]:
        return begin(ATTACKS[name])

    def compute(cores: float) -> dict[str, Any]:
        """Uses so much of the processor, as often as an attack does, and nothing else."""
        return begin(lambda _: computing(cores * PAUSE_S / len(victims)))

    def rest() -> dict[str, Any]:
        stop.set()
        for thread in threads:
            thread.join()
        return {"cpu_s": time.process_time() - begun[0], "seconds": time.monotonic() - begun[1]}

    conversation.answer({"attack": attack, "compute": compute, "rest": rest})


def computing(each_s: float) -> Steps:
    due_s = time.thread_time()
    while True:
        due_s += each_s
        while time.thread_time() < due_s:
            pass
        yield PAUSE_S


if __name__ == "__main__":
    main()
