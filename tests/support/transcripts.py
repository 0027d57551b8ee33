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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import NO_CLIPPING
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, Rank, Token
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource, WorkerSource
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.storage.checkpoint_book import Draft
from tests.support.machine_yards import MachineYard

RECORD: Final = bool(os.environ.get("PYTEST_RECORD"))
LEASE_MS: Final = 1_000
HIDDEN: Final = frozenset(
    {
        "layout",
        "settings",
        "job",
        "map",
        "url",
        "fingerprint",
        "variables",
        "optimizer",
        "body",
        "data_ledger",
        "why",
        "todo",
    }
)
"""Fields that are long and do not change from scenario to scenario, and the explanations of errors."""
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


class Stage:
    """A machine, the names of its members and jobs, and what a command does to it. `restarts`: from what it restarts at
    each `perhaps-restart`; empty: it does not."""

    def __init__(self, restarts: str = "") -> None:
        self.restarts = restarts
        self.yard = MachineYard(lease_ms=LEASE_MS)
        self.members: dict[str, Incarnation] = {}
        self.callers: dict[str, Caller] = {}
        self.leases: dict[str, DataLease] = {}
        self.settings: dict[str, JobSettings] = {"default": JobSettings(partitions=3, idle_ms=5_000)}
        self.asked: Any = None
        """The request whose ledgers are being read."""

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
            if isinstance(value, effects.VariablesPlaced | effects.RestorePartitions):
                owners = " ".join(self.name_of(each.server) for each in value.map.owners)
                with_values = f" map={value.map.generation}({owners})"
                with_values += f" url={value.url}" if isinstance(value, effects.RestorePartitions) else ""
            if isinstance(value, effects.JobSpec):
                shown += self._told(value)
            return type(value).__name__ + self.fields(shown) + with_values
        if isinstance(value, enum.Enum):
            return str(value.value)
        if isinstance(value, Mapping):
            return "{" + self.fields(value.items()).strip() + "}"
        if isinstance(value, list | tuple | set | frozenset):
            listed = [self.show(each, field.removesuffix("s")) for each in value]
            return "[" + " ".join(listed if isinstance(value, list | tuple) else sorted(listed)) + "]"
        if isinstance(value, bool) or value is None:
            return {True: "yes", False: "no", None: "-"}[value]
        if isinstance(value, int) and field in MEMBERS:
            return self.name_of(value)
        text = self.named(str(value))
        return f'"{text}"' if " " in text or not text else text

    @staticmethod
    def _told(spec: effects.JobSpec) -> list[tuple[str, object]]:
        """The settings that servers are told; optional ones only if they are set."""
        settings, consistency = spec.settings, spec.settings.consistency
        always = [("name", settings.name), ("seed", settings.seed), ("mode", spec.mode)]
        always += [("logical_ranks", settings.logical_rank_count), ("durability", settings.durability)]
        optional = [("staleness", consistency.bound), ("stale", consistency.stale)]
        optional += [("backup_workers", consistency.backup_workers), ("rows_at_once", consistency.rows_at_once)]
        if settings.server_clipping != NO_CLIPPING:
            optional.append(("clipping", settings.server_clipping))
        return [*always, *(each for each in optional if each[1])]

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
            return self.named("(" + " ".join(shown.split()) + ")")
        return "[" + " ".join(str(each).replace("\n", " ").strip() for each in value) + "]"

    # ---- what commands use

    def not_answered(self, kind: type[effects.Effect]) -> events.Event:
        """Some server did not answer the latest effect of this kind."""
        return events.NotAnswered(self.job(), self.yard.latest[kind])

    def caller(self, name: str) -> Caller:
        return self.callers[name]

    def job(self) -> JobId:
        return list(self.callers.values())[-1].job

    def draft(self) -> Draft:
        """The checkpoint that is being taken."""
        found = self.yard.machine.jobs[-1].book.draft
        assert found is not None
        return found

    def source(self, name: str, rank: str, shard: str, own: str = "") -> tuple[Any, Token]:
        """The source that a worker names, with the token that it has for it: of a rank, a data shard (`0.1.2`), its own
        work (or another worker's); else the data shard that it leased last."""
        if rank:
            job = self.yard.machine.jobs[-1]
            held = {each.rank: each.token for each in job_views.ranks_of(job, self.members[name])}
            return RankSource(Rank(int(rank))), held.get(Rank(int(rank)), Token(0))
        if own:
            return WorkerSource(self.members[own]), Token(0)
        lease = self.leases.get(name)
        if shard:
            return DataShardSource(*map(int, shard.split("."))), lease.token if lease else Token(0)
        assert lease is not None
        return lease.source, lease.token

    def restoring(self) -> Generation:
        """Of the map with which partitions are being restored; else of the latest one."""
        attempt = self.yard.machine.jobs[-1].recovery.attempt
        return self.generation() if attempt is None else attempt.map.generation

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
