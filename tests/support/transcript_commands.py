"""The commands of transcripts (tests/support/transcripts.py): what each does to the machine of a scenario."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any, Final

import yaml

from shardyard.checkpoints.manifest import FileRef, ResidualFile
from shardyard.config.settings import JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.ids import Caller, Generation, JobId, MemberRole, RunName, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataLease
from shardyard.domain.replica_groups import Strategy
from shardyard.domain.variables import DType, VariableSpec
from shardyard.storage.storage import Written
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.service.status import describe, list_quarantined
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard
from tests.support.transcripts import LEASE_MS, Scenario, Stage, Transcript

TICK_MS: Final = 100
VARIABLES: Final = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (3,)))
SGD: Final = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
FEED: Final = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)
BEGUN: Final = [
    [
        "feed_opened",
        {"feed": 0, **dataclasses.asdict(FEED), "batches_per_data_shard": 2, "units": 5, "first_step": 0},
    ],
    ["feed_progress", {"feed": 0, "begun": 3, "free": [1, 2], "reached": []}],
    ["data_leased", {"feed": 0, "epoch": 0, "index": 1, "worker": 8, "token": 40, "first": 0}],
]

Command = Callable[..., events.Event | list[str] | None]
VERBS: Final[dict[str, Command]] = {}


def play(transcript: Transcript, scenario: Scenario) -> Scenario:
    """The same commands, with the reactions of the machine as it is. A scenario with `perhaps-restart` is played three
    times: without restarts, with restarts from all records, and from the snapshot. All reactions must be the same."""
    plain = _play(transcript, scenario, "")
    if any(command == "perhaps-restart" for command, _ in scenario.steps):
        for restarts in ("records", "snapshot"):
            assert _play(transcript, scenario, restarts) == plain, f"{scenario.title}, after a restart: {restarts}"
    return plain


def _play(transcript: Transcript, scenario: Scenario, restarts: str) -> Scenario:
    stage = Stage(restarts)
    for line in transcript.head:
        if line.startswith("> "):
            do(stage, line[2:])
    return Scenario(scenario.title, [(command, do(stage, command)) for command, _ in scenario.steps])


def do(stage: Stage, command: str) -> list[str]:
    verb, *words = shlex.split(command)
    named = dict(word.split("=", 1) for word in words if "=" in word)
    given = [word for word in words if "=" not in word]
    reaction = VERBS[verb](stage, *given, **named)
    if reaction is None:
        return []
    return reaction if isinstance(reaction, list) else stage.react(reaction)


def verb(function: Command) -> Command:
    VERBS[function.__name__.rstrip("_").replace("_", "-")] = function
    return function


@verb
def yard(
    stage: Stage, *, servers: str = "2", checkpoints: str = "", lease_ms: str = str(LEASE_MS), expected: str = "1"
) -> None:
    """A coordinator with so many servers, which waits for those that are expected. `checkpoints`: the URL for jobs
    whose settings have none."""
    stage.yard = MachineYard(lease_ms=int(lease_ms), checkpoints=checkpoints or None, servers_expected=int(expected))
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
def server(stage: Stage, name: str, *, address: str = "", logs: str = "") -> list[str]:
    """A server registers, and replaces an earlier one of the same address. `logs`: the folder of its logs."""
    stage.members[name] = stage.yard.register(MemberRole.SERVER, address or f"s:{name}", logs=logs)
    return stage.shown(each for each in stage.yard.effects if not isinstance(each, effects.Reply))


@verb
def worker(stage: Stage, name: str, *, pid: str = "0") -> None:
    """A worker registers; without a pid it has one of its own."""
    stage.members[name] = stage.yard.register(MemberRole.WORKER, pid=int(pid) or None)


@verb
def join(stage: Stage, name: str, *, settings: str = "default", pid: str = "0", run: str = "") -> list[str]:
    """A worker joins the job that its settings name. It registers first, if it has not registered. `run`: the id of its
    launch, or ID/NUMBER."""
    if name not in stage.members:
        worker(stage, name, pid=pid)
    given = stage.settings[settings]
    launch, _, number = run.partition("/")
    of = RunName(launch, int(number or 1)) if launch else None
    reaction = stage.react(events.JobJoined(stage.members[name], given.name, given, of))
    for each in stage.yard.effects:
        if isinstance(each, effects.Reply) and isinstance(each.answer, effects.Joined):
            stage.callers[name] = Caller(each.answer.job, stage.members[name])
    return reaction


@verb
def variables(stage: Stage, name: str, *, b: str = "3") -> events.Event:
    """A worker registers the variables of its script. `b`: how many elements the second one has."""
    given = (VARIABLES[0], dataclasses.replace(VARIABLES[1], shape=(int(b),)))
    return events.VariablesRegistered(stage.caller(name), given, SGD)


@verb
def created(stage: Stage, *, generation: str = "1") -> events.Event:
    """The servers have made their partitions."""
    return events.PartitionsCreated(stage.job(), Generation(int(generation)))


@verb
def refused(stage: Stage) -> events.Event:
    """A server refused to make its partitions."""
    return stage.not_answered(effects.CreatePartitions)


@verb
def committed(stage: Stage, name: str, *, generation: str = "1") -> events.Event:
    """The worker has sent the first values."""
    return events.VariablesCommitted(stage.caller(name), Generation(int(generation)))


@verb
def opened(stage: Stage, *, generation: str = "1") -> events.Event:
    return events.PartitionsOpened(stage.job(), Generation(int(generation)))


@verb
def opening_failed(stage: Stage) -> events.Event:
    return stage.not_answered(effects.OpenPartitions)


@verb
def run(stage: Stage, name: str) -> list[str]:
    """Takes a job from joined to running: variables, partitions, first values. Shows only the job's state."""
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
    halted: str = "",
    halt: str = "1",
    pushed: str = "0",
    needs_servers: str = "",
) -> events.Event:
    """A heartbeat. `reached`: the step before which a worker of a job that stops can end; `switches`: the number of the
    switch that the worker has made; `halted`: the worker has halted (for the halt of the number `halt`) before this
    step, or, of data shards, has pushed so much work of its own since."""
    metrics = (("loss", float(loss)),) if loss else ()
    heard = int(reached) if reached else None
    report = Report(
        step=int(step),
        samples=int(samples),
        metrics=metrics,
        stop_reached=heard,
        switches=int(switches),
        pushed=int(pushed),
        switch_reached=(int(halt), int(halted)) if halted else None,
        needs_servers=needs_servers,
    )
    return events.HeartbeatReceived(stage.members[name], report)


@verb
def leave(stage: Stage, name: str, error: str = "", *, drained: str = "") -> events.Event:
    """A member leaves, with the error that ends it, if there is one. `drained`: it leaves because it drains."""
    return events.MemberLeft(stage.members[name], error, drained=bool(drained))


@verb
def drain(stage: Stage, name: str, *, by: str = "itself") -> events.Event:
    """A member is to leave in order. `by`: itself, or its number or address, by which a person names it."""
    if by == "itself":
        return events.DrainRequested(stage.members[name])
    incarnation = stage.members[name]
    members = {str(each.incarnation): each for each in stage.yard.machine.members}
    return events.DrainRequested(None, members[str(incarnation)].address if by == "address" else str(incarnation))


@verb
def kill(stage: Stage, name: str) -> list[str]:
    """The worker's agent reports that it was killed."""
    registered = next(
        each.registration for each in stage.yard.machine.members if each.incarnation == stage.members[name]
    )
    agent = stage.yard.register(MemberRole.AGENT, f"a:{name}")
    return stage.react(events.ExitReported(agent, registered.pid, -9))


@verb
def die_at(stage: Stage, name: str, sequence: str, *, settings: str = "default") -> list[str]:
    """A worker joins, takes a data shard, announces its batches up to this one and is killed. Shows the verdicts."""
    join(stage, name, settings=settings)
    found = lease(stage, name)[:1]
    for at in range(int(sequence) + 1):
        found += stage.react(batch(stage, name, str(at)))[:1]
    kill(stage, name)
    stage.react(fenced(stage, name))
    return found


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
    """The coordinator sleeps for so long, and gets no heartbeat meanwhile."""
    stage.yard.now_ms += int(ms)
    return stage.react(events.Ticked())


@verb
def feed(stage: Stage, name: str, number: str = "0", /, **given: str) -> events.Event:
    """`job.batches` in a worker's script: 100 samples in batches of 10, or as given."""
    changed = {key: int(value) for key, value in given.items()}
    return events.FeedOpened(stage.caller(name), int(number), dataclasses.replace(FEED, **changed))


@verb
def lease(stage: Stage, name: str, number: str = "0", *, of: str = "") -> list[str]:
    """A worker asks for a data shard of its job, or of another worker's job."""
    caller = dataclasses.replace(stage.caller(name), job=stage.caller(of or name).job)
    reaction = stage.react(events.LeaseRequested(caller, int(number)))
    for each in stage.yard.effects:
        if isinstance(each, effects.Reply) and isinstance(each.answer, DataLease):
            stage.leases[name] = each.answer
    return reaction


@verb
def give_back(stage: Stage, name: str, number: str = "0") -> events.Event:
    """The worker returns its lease, done or not. Without a lease it asks whether its ranks are done."""
    held = stage.leases.get(name)
    source, token = (held.source, held.token) if held is not None else (None, Token(0))
    stage.asked = events.LeaseReturned(stage.caller(name), int(number), source, token)
    return stage.asked


@verb
def ledgers(stage: Stage, next_sequence: str, *, map_age: str = "0") -> events.Event:
    """All servers have applied the batches before this one, under this map or one that is so much older."""
    return events.LedgerRead(stage.asked, int(next_sequence), Generation(stage.generation() - int(map_age)))


@verb
def steps(stage: Stage, step: str, *, map_age: str = "0") -> events.Event:
    """The servers have said at which step the job is, under this map or one that is so much older."""
    return events.StepsRead(stage.job(), Generation(stage.generation() - int(map_age)), int(step))


@verb
def steps_unread(stage: Stage) -> events.Event:
    """A server did not answer."""
    return stage.not_answered(effects.ReadSteps)


@verb
def stop(stage: Stage, name: str, reason: str = "") -> events.Event:
    """A worker stops its job, or a person stops the job with this name."""
    caller = stage.callers.get(name)
    return events.StopRequested(caller, "" if caller else name, reason)


@verb
def switch(stage: Stage, mode: str = "", *, staleness: str = "", strategy: str = "", job: str = "") -> events.Event:
    """A person changes the consistency mode or the strategy of a job, of the only one where none is named."""
    chosen = ConsistencyMode(mode) if mode else None
    bound, wanted = int(staleness) if staleness else None, Strategy(strategy) if strategy else None
    return events.SwitchRequested(job, chosen, bound, wanted)


@verb
def group(stage: Stage, name: str, *, left: str = "0", step: str = "") -> events.Event:
    """A worker has left the replica group of that number, and asks for the next one. `step`: that of its replica."""
    return events.ReplicaGroupAsked(stage.caller(name), int(left), int(step) if step else None)


@verb
def published(stage: Stage, name: str, generation: str, step: str) -> events.Event:
    """The members of that replica group have given the servers the state of this step."""
    return events.ReplicasPublished(stage.caller(name), int(generation), int(step))


@verb
def paced(stage: Stage, number: str) -> events.Event:
    """All servers use the switch with this number."""
    return events.ServersPaced(stage.job(), stage.generation(), int(number))


@verb
def unpaced(stage: Stage) -> events.Event:
    """A server was not told of the switch."""
    return stage.not_answered(effects.PaceServers)


@verb
def checkpoint(stage: Stage, *, step: str = "0", created_s: str = "0", draft: str = "") -> events.Event:
    """The checkpoint that is being taken is complete, or the one with the number `draft`."""
    number = int(draft) if draft else stage.draft().number
    return events.CheckpointTaken(stage.job(), number, number, int(step), created_s=int(created_s))


@verb
def checkpoint_failed(
    stage: Stage, error: str = "the disk is full", *, kind: str = "StorageUnavailable"
) -> events.Event:
    """The storage refuses the checkpoint that is being taken."""
    return events.CheckpointFailed(stage.job(), stage.draft().number, getattr(errors, kind)(error))


@verb
def ask_checkpoint(stage: Stage, name: str = "", *, ticket: str = "0", of: str = "") -> events.Event:
    """A person, or the worker `of`, asks for a checkpoint of a job, or what became of the one with this ticket."""
    return events.CheckpointRequested(stage.caller(of) if of else None, name, int(ticket))


@verb
def batch(
    stage: Stage, name: str, sequence: str, *, rank: str = "", shard: str = "", token: str = "", highest: str = "0"
) -> events.Event:
    """A worker announces a batch of its data shard, or a step of its rank: does it count?"""
    source, held = stage.source(name, rank, shard)
    return events.BatchBegun(
        stage.caller(name), source, Token(int(token)) if token else held, int(sequence), int(highest)
    )


@verb
def restored(stage: Stage, *, generation: str = "") -> events.Event:
    """The servers have read the partitions that they were given, under the latest map or one of this generation."""
    return events.PartitionsRestored(stage.job(), Generation(int(generation)) if generation else stage.restoring())


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
def perhaps_restart(stage: Stage) -> None:
    """The coordinator restarts in the second and in the third play of the scenario (see `play`)."""
    if stage.restarts:
        stage.yard.restart(from_snapshot=stage.restarts == "snapshot")


@verb
def order_restore(
    stage: Stage,
    *,
    mode: str = "async",
    number: str = "7",
    step: str = "60",
    logical_ranks: str = "",
    ledger: str = "",
    residual_of: str = "",
) -> events.Event:
    """A person orders the next run of the job `default` to begin with a checkpoint of another run, whose workers are
    gone. `ledger=begun`: of its five data shards the first is closed, the second leased, the third given back.
    `residual_of`: a worker whose residual is in it."""
    file = FileRef(f"{number}/worker-{residual_of}.safetensors", Written(9, "a" * 64))
    begun = ledger == "begun"
    return events.RestoreOrdered(
        RestorePoint(
            name="default",
            url="/elsewhere",
            number=int(number),
            job=JobId((1 << 32) + 5),
            step=int(step),
            mode=UpdateMode(mode),
            logical_ranks=int(logical_ranks or stage.settings["default"].logical_rank_count),
            seed=99,
            layout=plan(VARIABLES, SGD, partitions=4, block_bytes=64),
            data_ledger={"entries": BEGUN if begun else [], "closed": int(begun), "token": 44},
            token=Token(44),
            floor=Token(40 if begun else 0),
            created_s=0,
            feedback=(ResidualFile(residual_of, file),) if residual_of else (),
        )
    )


@verb
def order_return(stage: Stage) -> events.Event:
    """A person orders the running job to go back to its newest checkpoint."""
    job = stage.yard.machine.jobs[-1]
    committed, layout = job.book.committed, job.deployment.layout
    assert committed is not None
    assert layout is not None
    return events.RestoreOrdered(
        RestorePoint(
            name=job.settings.name,
            url=job.book.url,
            number=committed.number,
            job=job.id,
            step=committed.step,
            mode=job.settings.consistency.mode.updates,
            logical_ranks=job.settings.logical_rank_count,
            seed=job.settings.seed,
            layout=layout,
            data_ledger=committed.data_ledger,
            token=Token(44),
            floor=Token(0),
            created_s=0,
        )
    )


@verb
def cancel_restore(stage: Stage) -> events.Event:
    return events.RestoreCancelled("default")


@verb
def log_bytes(stage: Stage, name: str, nbytes: str) -> events.Event:
    """A server's heartbeat says how long its log is."""
    return events.HeartbeatReceived(stage.members[name], Report(), ((stage.job(), int(nbytes)),))


@verb
def member(stage: Stage, name: str, *names: str) -> list[str]:
    """The fields that are named, of a member in the coordinator's status."""
    found = describe(stage.yard.machine, stage.yard.now_ms).members
    shown = next(each for each in found if each.incarnation == stage.members[name])
    return [" ".join(f"{each}={stage.said(getattr(shown, each))}" for each in names)]


@verb
def status(stage: Stage, *names: str) -> list[str]:
    """The latest job: its state, and the fields that are named."""
    job = describe(stage.yard.machine, stage.yard.now_ms).jobs[-1]
    shown = "".join(f" {name}={stage.said(getattr(job, name))}" for name in names if name != "mode")
    if "mode" in names:
        shown += f" mode={stage.yard.machine.jobs[-1].settings.consistency.mode.updates.value}"
    failure = f" {stage.named(job.failure.what)}" if job.HasField("failure") else ""
    state = wire.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
    return [f"{state} workers={job.workers}{shown}{failure}"]


@verb
def compute(stage: Stage, name: str, shards: str, *, batches: str = "3") -> list[str]:
    """A worker takes so many data shards, one after the other, and servers apply their batches. Shows what closed."""
    found: list[str] = []
    for _ in range(int(shards)):
        lease(stage, name)
        stage.react(give_back(stage, name))
        found += [line for line in stage.react(ledgers(stage, batches)) if line.startswith("record data_closed")]
    return found


@verb
def go_over(stage: Stage, mode: str, at: str) -> list[str]:
    """A switch to the other mode of updates, up to the restore with which the job goes over: all workers halt, the
    servers say the step, a checkpoint of it is complete. Shows the restore alone."""
    to_steps = mode == "sync"
    stage.react(switch(stage, mode))
    for name in stage.callers:
        stage.react(beat(stage, name, halted="0" if to_steps else at))
    stage.react(steps(stage, at))
    for name in () if to_steps else stage.callers:
        stage.react(beat(stage, name, step=at))
    sleep(stage, "100")
    stage.react(checkpoint(stage, step=str(stage.draft().step)))
    return [line for line in sleep(stage, "100") if line.startswith("RestorePartitions")]


@verb
def restore_failed(stage: Stage, error: str = "the disk is gone", *, kind: str = "StorageUnavailable") -> events.Event:
    """The servers cannot read the partitions that they were given."""
    return events.RestoreFailed(stage.job(), stage.restoring(), getattr(errors, kind)(error))


@verb
def not_finite(
    stage: Stage,
    name: str,
    first: str,
    last: str = "",
    *,
    count: str = "1",
    in_a_row: str = "1",
    highest: str = "0",
    rank: str = "",
    shard: str = "",
    own: str = "",
) -> events.Event:
    """A worker reports that the gradient of these batches is not finite. `count`: how many it has reported."""
    source, token = stage.source(name, rank, shard, own)
    given = (int(first), int(last or first), "w", int(count), int(in_a_row), 40 + int(first), int(highest))
    return events.NotFiniteReported(stage.caller(name), source, token, *given)


@verb
def quarantine(stage: Stage) -> list[str]:
    """What is in quarantine, as the coordinator lists it for people."""
    found = list_quarantined(stage.yard.machine, stage.job())
    return [stage.said(each) for each in (*found.batches, *found.feeds)]
