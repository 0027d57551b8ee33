"""The state of one run, which all parts of the simulator read and change, and what is left of it in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardyard.domain.ids import Incarnation
from shardyard_ps_server.wal.records import Mark

from .disk import Disk
from .hand_overs import HandOvers
from .network import Wires
from .paces import Paces
from .plan import Plan
from .world import Process, World

COORDINATOR = "coordinator:7000"
JOB = "simulated"


@dataclass
class Ending:
    """How a run ended. `violations`: which rules were broken."""

    plan: Plan
    violations: list[str] = field(default_factory=list)
    digest: int = 0
    virtual_s: float = 0.0
    switches: int = 0
    calls: int = 0
    starts: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    versions: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """For synchronous jobs: the values at each step that was computed."""
    pushes: dict[int, int] = field(default_factory=dict)
    """Yard.pushes."""
    standing: str = ""
    happened: list[str] = field(default_factory=list)

    @property
    def red(self) -> bool:
        return bool(self.violations)


class Yard:
    """The state of a run. `trace` is told each line of what happens."""

    def __init__(
        self, plan: Plan, folder: Path, undisturbed: Ending | None, trace: Callable[[str], None] | None
    ) -> None:
        self.plan = plan
        self.undisturbed = undisturbed
        """The same work without faults, if this run is compared with it."""
        self.world = World(plan.seed, preempt=plan.preempt, trace=trace)
        self.wires = Wires(self.world)
        self.world.unnoted = str(folder).encode()
        self.wires.weather = plan.weather
        self.state = folder / "state"
        self.disk = Disk(self.world, folder / "disk")
        self.checkpoints = self.disk.root / "checkpoints"
        self.places: dict[str, Process] = {}
        self.starts = 0
        self.finished: dict[str, dict[str, bytes]] = {}
        self.happened: list[str] = []
        self.told_to_leave: dict[Process, Callable[[], None]] = {}
        """What a signal does in a server or a worker."""
        self.members: dict[Process, Incarnation] = {}
        """The workers that may be told to leave."""
        self.hand_overs = HandOvers()
        self.journal_full_until = 0
        """Until when the disk of the coordinator's journal is full."""
        self.unfinished: dict[object, None] = {}
        """Jobs that began and have not ended."""
        self.jobs_finished = 0
        self.jobs_failed = 0
        """A worker that comes after a failure belongs to another launch."""
        self.goodbyes = 0
        self.versions: dict[int, dict[str, bytes]] = {}
        self.pushes: dict[int, int] = {}
        """For hybrid jobs, by step: the least number of pushes in the rows on which the step was computed."""
        self.left_out: dict[object, set[int]] = {}
        """By run of the job: the coordinates whose batches the coordinator has put into quarantine."""
        self.stops: dict[object, int | None] = {}
        """By run of the job: the step before which it stops."""
        self.has_checkpoint = False
        """Whether a checkpoint was ever committed."""
        self.waived = False
        """Whether a job has begun without a first checkpoint, which its disk had refused."""
        self.paces = Paces(self.world.violations.append)
        self.effective: dict[Path, Mark] = {}
        """By the folder of a log: the end of the last record that has taken effect."""
        self.hosts = (
            "coordinator",
            *(f"server-{index}" for index in range(plan.servers)),
            *(f"worker-{index}" for index in range(plan.workers)),
        )
        self.strangers: list[Process] = []
        """Processes of no host of the yard: a person, a thief."""
        self.certificates: dict[str, str] = {}
        """The names in the certificates of places whose name is another."""
        self.revoked_at: int | None = None
        """When the coordinator has answered that the stolen certificate is revoked."""


running: list[Yard] = []


def current_yard() -> Yard:
    return running[-1]
