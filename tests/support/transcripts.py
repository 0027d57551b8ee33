"""Scenarios of the coordinator's machine as text: commands, and below each the reaction that was recorded.

A file holds scenarios. A scenario begins with `## TITLE` and has a machine of its own. A command is a line that begins
with `> `; the indented lines below it are the reaction: the answer (or the error), records, effects. Members have the
names that the script gives them (`s0` and `s1` are the servers of `yard`). `PYTEST_RECORD=1` writes the files anew;
read the difference before you commit it.

    ## a second worker joins the job that runs
    > yard servers=1
    > join a
      reply Joined started logical_ranks=1 chief
      record job_started
      record worker_joined worker=a
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from google.protobuf.message import Message

from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource, WorkerSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

RECORD: Final = bool(os.environ.get("PYTEST_RECORD"))
LEASE_MS: Final = 1_000
TICK_MS: Final = 100
VARIABLES: Final = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (3,)))
SGD: Final = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
FEED: Final = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)
HIDDEN: Final = frozenset({"layout", "settings", "job", "map", "url", "fingerprint", "variables", "optimizer", "body"})
"""Fields that are long and do not change from scenario to scenario."""
MEMBERS: Final = frozenset({"worker", "incarnation", "server", "keeper", "log", "fenced"})
"""Fields, of effects and of records, whose numbers are members."""


@dataclasses.dataclass
class Scenario:
    title: str
    steps: list[tuple[str, list[str]]]
    """Each command, with the lines of its reaction."""


@dataclasses.dataclass
class Transcript:
    head: list[str]
    """The lines before the first scenario: what the file is about, and commands that each scenario begins with."""
    scenarios: list[Scenario]


def read(path: Path) -> Transcript:
    """Raises ValueError for a line that is no title, command, reaction or comment."""
    found = Transcript([], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            found.scenarios.append(Scenario(line[3:], []))
        elif not found.scenarios:
            found.head.append(line)
        elif line.startswith("> "):
            found.scenarios[-1].steps.append((line[2:], []))
        elif line.startswith("  "):
            found.scenarios[-1].steps[-1][1].append(line[2:])
        elif line.strip():
            raise ValueError(f"{path.name}:{number}: {line!r} is no title, command or reaction")
    return found


def write(path: Path, transcript: Transcript) -> None:
    lines = [*transcript.head]
    while lines and not lines[-1].strip():
        lines.pop()
    for scenario in transcript.scenarios:
        lines += ["", f"## {scenario.title}"]
        for command, reaction in scenario.steps:
            lines += [f"> {command}", *(f"  {line}" for line in reaction)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def play(transcript: Transcript, scenario: Scenario) -> Scenario:
    """The same commands, with the reactions of the machine as it is."""
    stage = Stage()
    for line in transcript.head:
        if line.startswith("> "):
            stage.do(line[2:])
    return Scenario(scenario.title, [(command, stage.do(command)) for command, _ in scenario.steps])


class Stage:
    """A machine, the names of its members and jobs, and what a command does to it."""

    def __init__(self) -> None:
        self.yard = MachineYard(lease_ms=LEASE_MS)
        self.members: dict[str, Incarnation] = {}
        self.callers: dict[str, Caller] = {}
        self.leases: dict[str, DataLease] = {}
        self.settings: dict[str, JobSettings] = {"default": JobSettings(partitions=3, idle_ms=5_000)}
        self.asked: Any = None
        """The request whose ledgers are being read."""

    def do(self, command: str) -> list[str]:
        verb, *words = shlex.split(command)
        named = dict(word.split("=", 1) for word in words if "=" in word)
        given = [word for word in words if "=" not in word]
        reaction = VERBS[verb](self, *given, **named)
        if reaction is None:
            return []
        return reaction if isinstance(reaction, list) else self.react(reaction)

    def react(self, event: events.Event) -> list[str]:
        """Gives an event to the machine. Returns the answer or the error, then the effects."""
        try:
            self.yard.handle(event)
        except ShardyardError as error:
            return [f"refused {self.show(error)}"]
        return self.shown(self.yard.effects)

    def shown(self, found: Iterable[effects.Effect]) -> list[str]:
        replies, others = [], []
        for each in found:
            if isinstance(each, effects.Reply):
                replies.append(f"reply {self.show(each.answer)}")
            elif isinstance(each, effects.Persist):
                others.append(f"record {each.kind}{self.fields(each.body.items())}")
            elif isinstance(each, effects.LogMessage):
                others.append(f"{'warning' if each.warning else 'log'} {self.named(each.text)}")
            else:
                others.append(self.show(each))
        return replies + others

    # ---- values as text

    def name_of(self, member: int) -> str:
        return next((name for name, each in self.members.items() if each == member), f"#{member}")

    def job_name(self, job: int) -> str:
        known = list(dict.fromkeys(caller.job for caller in self.callers.values()))
        return f"job{known.index(JobId(job)) + 1}" if job in known else f"job#{job}"

    def named(self, text: str) -> str:
        """Incarnations in a text, which it shows as term.number, by their names; and no job's number."""
        text = re.sub(r"\bjob '([^']*)' \([\d.]+\)", r"job '\1'", text)
        return re.sub(r"\b\d+\.\d+\b", lambda met: self._spelt(met.group()), text)

    def _spelt(self, shown: str) -> str:
        return next((name for name, each in self.members.items() if str(each) == shown), shown)

    def show(self, value: Any, field: str = "") -> str:
        if isinstance(value, ShardyardError):
            return f"{type(value).__name__}: {' '.join(self.named(value.what).split())}"
        if isinstance(value, RankSource | DataShardSource | WorkerSource):
            return self.named(str(value)).replace(" ", "-")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if type(value).__name__ == "Server":
                return self.name_of(value.incarnation)
            shown = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if shows(value, each)]
            with_values = " with-values" if isinstance(value, effects.JobView) and value.map is not None else ""
            return type(value).__name__ + self.fields(shown) + with_values
        if isinstance(value, enum.Enum):
            return str(value.value)
        if isinstance(value, Mapping):
            return "{" + self.fields(value.items()).strip() + "}"
        if isinstance(value, list | tuple | set | frozenset):
            return "[" + " ".join(self.show(each, field.removesuffix("s")) for each in value) + "]"
        if isinstance(value, bool) or value is None:
            return {True: "yes", False: "no", None: "-"}[value]
        if isinstance(value, int) and field in MEMBERS:
            return self.name_of(value)
        text = self.named(str(value))
        return f'"{text}"' if " " in text or not text else text

    def fields(self, given: Iterable[tuple[Any, Any]]) -> str:
        found = []
        for name, value in given:
            if name in HIDDEN or value in ((), [], None):
                continue
            if isinstance(value, bool):
                found.append(f" {name}" if value else f" not-{name}")
            else:
                found.append(f" {name}={self.show(value, str(name))}")
        return "".join(found)

    def said(self, value: Any) -> str:
        """A field of a message."""
        if isinstance(value, str | int | float):
            return self.show(value)
        if isinstance(value, Message):
            shown = re.sub(r"\b\d{10,}\b", lambda met: self.name_of(int(met.group())), str(value))
            return "(" + " ".join(shown.split()) + ")"
        return "[" + " ".join(str(each).replace("\n", " ").strip() for each in value) + "]"

    # ---- what commands use

    def caller(self, name: str) -> Caller:
        return self.callers[name]

    def job(self) -> JobId:
        return list(self.callers.values())[-1].job

    def generation(self) -> Generation:
        """Of the map of the latest job."""
        found = self.yard.machine.jobs[-1].deployment.generation
        assert found is not None
        return found


def shows(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether a field is in the transcript: not where it has its default."""
    return field.name not in HIDDEN and (
        field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    )


# ---- commands

Command = Callable[..., events.Event | list[str] | None]
VERBS: Final[dict[str, Command]] = {}


def verb(function: Command) -> Command:
    VERBS[function.__name__.rstrip("_").replace("_", "-")] = function
    return function


@verb
def yard(stage: Stage, *, servers: str = "2") -> None:
    """A coordinator with so many servers."""
    for index in range(int(servers)):
        stage.members[f"s{index}"] = stage.yard.register(MemberRole.SERVER, f"s:{index}")


@verb
def settings(stage: Stage, under: str, /, **given: str) -> None:
    """Settings of jobs under a name: those of `default`, and these paths with values."""
    document: dict[str, Any] = stage.settings["default"].model_dump(mode="json")
    for path, value in given.items():
        *sections, last = path.split(".")
        place = document
        for section in sections:
            place = place[section]
        place[last] = yaml.safe_load(value)
    stage.settings[under] = JobSettings.model_validate(document)


@verb
def server(stage: Stage, name: str, *, address: str = "") -> list[str]:
    """A server registers; one of the same address before it is replaced."""
    stage.members[name] = stage.yard.register(MemberRole.SERVER, address or f"s:{name}")
    return stage.shown(each for each in stage.yard.effects if not isinstance(each, effects.Reply))


@verb
def worker(stage: Stage, name: str, *, pid: str = "0") -> None:
    """A worker registers; without a pid it has one of its own."""
    stage.members[name] = stage.yard.register(MemberRole.WORKER, pid=int(pid) or None)


@verb
def join(stage: Stage, name: str, *, settings: str = "default", pid: str = "0") -> list[str]:
    """A worker joins a job, by the name in its settings. It registers before, if it has not."""
    if name not in stage.members:
        worker(stage, name, pid=pid)
    given = stage.settings[settings]
    reaction = stage.react(events.JobJoined(stage.members[name], given.name, given))
    for each in stage.yard.effects:
        if isinstance(each, effects.Reply) and isinstance(each.answer, effects.Joined):
            stage.callers[name] = Caller(each.answer.job, stage.members[name])
    return reaction


@verb
def variables(stage: Stage, name: str) -> events.Event:
    return events.VariablesRegistered(stage.caller(name), VARIABLES, SGD)


@verb
def created(stage: Stage) -> events.Event:
    """The servers have made their partitions."""
    return events.PartitionsCreated(stage.job())


@verb
def refused(stage: Stage) -> events.Event:
    """A server refused to make its partitions."""
    return events.PartitionsRefused(stage.job())


@verb
def committed(stage: Stage, name: str) -> events.Event:
    """The worker has sent the first values."""
    return events.VariablesCommitted(stage.caller(name))


@verb
def opened(stage: Stage) -> events.Event:
    return events.PartitionsOpened(stage.job())


@verb
def opening_failed(stage: Stage) -> events.Event:
    return events.OpeningFailed(stage.job())


@verb
def run(stage: Stage, name: str) -> list[str]:
    """From joined to running: variables, partitions, first values. Shows the job's state alone."""
    stage.yard.open_job(stage.caller(name), VARIABLES, SGD)
    return status(stage)


@verb
def beat(
    stage: Stage,
    name: str,
    *,
    step: str = "0",
    samples: str = "0",
    loss: str = "",
    reached: str = "",
    switches: str = "0",
) -> events.Event:
    """A heartbeat. `reached`: the step before which a worker of a job that stops can end; `switches`: the number of the
    switch that the worker has made."""
    metrics = (("loss", float(loss)),) if loss else ()
    heard = int(reached) if reached else None
    report = Report(step=int(step), samples=int(samples), metrics=metrics, reached=heard, switches=int(switches))
    return events.HeartbeatReceived(stage.members[name], report)


@verb
def leave(stage: Stage, name: str, error: str = "") -> events.Event:
    """A member says goodbye, or why it ends."""
    return events.MemberLeft(stage.members[name], error)


@verb
def kill(stage: Stage, name: str) -> list[str]:
    """The worker's agent reports that it was killed."""
    registered = next(
        each.registration for each in stage.yard.machine.members if each.incarnation == stage.members[name]
    )
    agent = stage.yard.register(MemberRole.AGENT, f"a:{name}")
    return stage.react(events.ExitReported(agent, registered.pid, -9))


@verb
def fenced(stage: Stage, *names: str) -> events.Event:
    """All servers refuse these workers."""
    return events.WorkersFenced(stage.job(), tuple(stage.members[name] for name in names))


@verb
def advance(stage: Stage, ms: str, *alive: str) -> list[str]:
    """Time passes, in ticks of 100 ms, while these members send heartbeats. Shows what the ticks did."""
    found: list[str] = []
    for _ in range(0, int(ms), TICK_MS):
        stage.yard.now_ms += TICK_MS
        for name in alive:
            stage.yard.beat(stage.members[name])
        stage.yard.handle(events.Ticked())
        found += stage.shown(stage.yard.effects)
    return found


@verb
def sleep(stage: Stage, ms: str) -> list[str]:
    """The coordinator sleeps for so long, and hears nobody meanwhile."""
    stage.yard.now_ms += int(ms)
    return stage.react(events.Ticked())


@verb
def feed(stage: Stage, name: str, number: str = "0", /, **given: str) -> events.Event:
    """`job.batches` in a worker's script: 100 samples in batches of 10, or as given."""
    changed = {key: int(value) for key, value in given.items()}
    return events.FeedOpened(stage.caller(name), int(number), dataclasses.replace(FEED, **changed))


@verb
def lease(stage: Stage, name: str, number: str = "0", *, of: str = "") -> list[str]:
    """A worker asks for a data shard of its job, or of another worker's."""
    caller = dataclasses.replace(stage.caller(name), job=stage.caller(of or name).job)
    reaction = stage.react(events.LeaseRequested(caller, int(number)))
    for each in stage.yard.effects:
        if isinstance(each, effects.Reply) and isinstance(each.answer, DataLease):
            stage.leases[name] = each.answer
    return reaction


@verb
def give_back(stage: Stage, name: str, number: str = "0") -> events.Event:
    """The worker gives its lease back, done or not; where it has none, it asks whether its ranks are done."""
    held = stage.leases.get(name)
    source, token = (held.source, held.token) if held is not None else (None, Token(0))
    stage.asked = events.LeaseReturned(stage.caller(name), int(number), source, token)
    return stage.asked


@verb
def ledgers(stage: Stage, next_sequence: str) -> events.Event:
    """All servers have applied the batches before this one."""
    return events.LedgerRead(stage.asked, int(next_sequence))


@verb
def steps(stage: Stage, step: str, *, map_age: str = "0") -> events.Event:
    """The servers have said at which step the job is, under this map or one that is so much older."""
    return events.StepsRead(stage.job(), Generation(stage.generation() - int(map_age)), int(step))


@verb
def steps_unread(stage: Stage) -> events.Event:
    """A server did not answer."""
    return events.StepsUnread(stage.job())


@verb
def stop(stage: Stage, name: str, reason: str = "") -> events.Event:
    """A worker, or (by the name of a job) a person, stops the job."""
    caller = stage.callers.get(name)
    return events.StopRequested(caller, "" if caller else name, reason)


@verb
def switch(stage: Stage, mode: str = "", *, staleness: str = "", job: str = "") -> events.Event:
    """A person changes the consistency mode of a job, of the only one where none is named."""
    chosen = ConsistencyMode(mode) if mode else None
    return events.SwitchRequested(job, chosen, int(staleness) if staleness else None)


@verb
def paced(stage: Stage, number: str) -> events.Event:
    """All servers go by the switch of this number."""
    return events.ServersPaced(stage.job(), stage.generation(), int(number))


@verb
def unpaced(stage: Stage) -> events.Event:
    """A server was not told of the switch."""
    return events.ServersUnpaced(stage.job())


@verb
def checkpoint(stage: Stage, *, step: str = "0") -> events.Event:
    """The checkpoint that is being taken is complete."""
    draft = stage.yard.machine.jobs[-1].keeping.book.draft
    assert draft is not None
    return events.CheckpointTaken(stage.job(), draft.number, draft.number, int(step))


@verb
def restored(stage: Stage) -> events.Event:
    """The servers have read the partitions that they were given."""
    return events.PartitionsRestored(stage.job(), stage.generation())


@verb
def follow(stage: Stage, reader: str, *, job: str = "", of: str = "", leaves: str = "") -> events.Event:
    """An evaluator asks about a job: by name, or as the job of a worker. Readers have numbers."""
    number = stage.caller(of).job if of else None
    return events.ReaderHeard(number, job, int(reader).to_bytes(16, "big"), bool(leaves))


@verb
def evaluated(
    stage: Stage, of: str, *, step: str = "0", accuracy: str = "0", at_s: str = "0", kept: str = ""
) -> events.Event:
    """An evaluator reports on the job of a worker, and at which URL it keeps the best version."""
    found = Evaluation(int(step), (("accuracy", float(accuracy)),), int(at_s))
    best = Best("accuracy", False, float(accuracy), int(step), kept, int(at_s)) if kept else None
    return events.EvaluationReported(stage.caller(of).job, found, best)


@verb
def restart(stage: Stage, *, written: str = "records") -> list[str]:
    """The coordinator restarts from all its records, or from its snapshot."""
    return stage.shown(stage.yard.restart(from_snapshot=written == "snapshot"))


@verb
def status(stage: Stage, *names: str) -> list[str]:
    """The latest job: its state, and the fields that are named."""
    job = describe(stage.yard.machine, stage.yard.now_ms).jobs[-1]
    shown = "".join(f" {name}={stage.said(getattr(job, name))}" for name in names)
    failure = f" {stage.named(job.failure.what)}" if job.HasField("failure") else ""
    state = wire.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
    return [f"{state} workers={job.workers}{shown}{failure}"]
