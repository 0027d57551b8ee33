"""The fields of the coordinator's machine that no record brings back, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NOT_RECORDED: Final[Mapping[str, str]] = {
    "Machine.term": "each opening of the journal has its own, higher one",
    "Machine._ticked_ms": "the clock of another process means nothing",
    "Machine.waits": "the time of each wait begins anew",
    "Member.waiting_for": "said again with the next heartbeat",
    "Member.last_seen_ms": "a lease counts as just renewed (rule C4)",
    "Member.drain_until_ms": "that the member drains is recorded; its time to leave begins anew",
    "Roster._idle_since_ms": "a job without workers waits for its idle time anew: nobody could join meanwhile",
    "Roster._over_at_ms": "whether it is set is recorded; the time for late workers begins anew",
    "LastCheckpoint.ticket": "the last checkpoint is begun anew",
    "LastCheckpoint.told": "told by the tries of this life",
    "JobState.progress": "workers report it again with the next heartbeat; when a job is finishing its step is"
    " recorded, because it has no workers, and when it ends all of it",
    "JobState.rows_seen": "servers say it again with the next heartbeat",
    "JobState.departing": "found again with the next tick",
    "JobState.missing": "found again with the next tick",
    "Membership._server_came_ms": "the servers that are expected are waited for anew",
    "Membership._agents": "workers of an agent that has registered again since are lost with their lease",
    "JobState.reads_steps": "servers are asked again",
    "ReplicaBook._asking": "workers that wait ask again every moment",
    "ReplicaBook._hosts": "workers that wait ask again every moment",
    "ReplicaBook._asked_since_ms": "the expected workers are waited for anew",
    "ReplicaBook._is_fresh": "the next checkpoint may have the state that was published last",
    "ReplicaBook._asked_for_ms": "members that wait for a checkpoint go on, and publish for the next one",
    "ReplicaBook.is_to_publish": "wanted again with the checkpoint after that",
    "JobState.readers": "readers say it again every second, and servers are told again to drop a job that has ended",
    "Stopping._reached": "workers say it again with each heartbeat",
    "PendingSwitch._reached": "as those of a stop",
    "ModeSetting._told": "servers are told again; until they have answered workers are told what was before",
    "ModeSetting._asking": "servers are asked again",
    "ModeSetting._retry_at_ms": "at once",
    "JobState.restored": "said of this life's recoveries alone",
    "StepVerdicts._present": "workers tell it again while they wait for the verdict",
    "JobState.step_times": "times of another life mean nothing; how long steps take is seen again",
    "Recovery._since_ms": "lost partitions wait for a server's restart anew",
    "Recovery._retry_at_ms": "tried again at once",
    "Recovery.waits_for": "found again with the next tick",
    "Recovery.attempt": "the calls to servers are made again, in another life",
    "CheckpointBook._begun_ms": "the time to the next checkpoint begins anew",
    "CheckpointBook._begun_step": "so do the steps to it",
    "CheckpointBook._first_ms": "the first checkpoint has all of its time again",
    "CheckpointBook._retry_at_ms": "one that failed is tried again at once",
    "CheckpointBook._failures": "and as if for the first time",
    "CheckpointBook._wanted": "who waited asks again",
    "CheckpointBook._failed": "who waited hears of the next one",
    "CheckpointBook.draft": "it was this process that would have written the manifest",
    "CheckpointBook._abandoned": "it was this process that was writing them",
    "Departed._is_due": "partitions are asked again",
    "Departed._is_asked": "at once",
    "Departed._retry_at_ms": "also where a server has just failed to answer",
    "Deployment._retry_at_ms": "what was under way is tried again at once",
    "_RankState.unowned_since_ms": "an unowned rank waits for its grace time anew",
}
"""Fields (by class) that a machine does not get back from its records, and the reason. All others it does; of
`Deployment.stage`, CREATING and OPENING come back as UNCREATED and COMMITTED: the calls to servers are made again."""
