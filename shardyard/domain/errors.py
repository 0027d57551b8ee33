"""The errors of a yard, one tree, each with what happened, why that is an error, and what to do.

    ShardyardError
    |-- InvalidRequest              what was asked cannot be done, now or later; nothing changed
    |   |-- ConfigurationError      a settings file, an environment variable or a flag
    |   |-- ShapeMismatch  DTypeMismatch  UnknownVariable  VariableConflict  RateMismatch
    |   |-- MalformedPayload  TooLarge  UnsupportedOptimizer  UnsupportedModel
    |   |-- FeedConflict  UnseekableDataset  ProtocolMismatch  LaunchRefused  NotShareable
    |   |-- TableError              a table of rows
    |   |   |-- TableFull
    |-- Refused                     the sender is behind the times; it must learn, then may go on
    |   |-- StaleIncarnation
    |   |   |-- WorkerQuarantined
    |   |-- StaleToken  StaleGeneration  StaleTerm
    |   |-- SequenceGap  StraddlingRange
    |-- NotFound                    no such job, partition, launch, version
    |   |-- CheckpointNotFound  VersionPassed
    |-- NotReady                    ask again later
    |-- Unavailable                 a peer does not answer
    |   |-- CoordinatorUnavailable  ServerUnavailable  DeadlineExceeded
    |-- StorageUnavailable          a disk or an object store refuses, or is not there
    |-- CheckpointDamaged           a file of a checkpoint differs from what was written
    |-- LogDamaged                  a file of a server's log differs from what was written
    |-- JobFailed                   the job has ended by an error
    |   |-- ServerLost  CoordinatorLost  WorkerFailed  NonFiniteGradient
    |-- AddressInUse
    |-- Internal                    a defect of ours

Owns: the tree and its registry by code. Must not know: gRPC (shardyard.transport.error_codes maps codes to it).
"""

from __future__ import annotations

from typing import ClassVar


class ShardyardError(Exception):
    """Base of all errors that a yard raises. `code` is the class's name, also on the wire."""

    why: ClassVar[str] = ""
    todo: ClassVar[str] = ""

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        todo: str | None = None,
        facts: dict[str, str] | None = None,
    ) -> None:
        self.what = what
        self.why_text = type(self).why if why is None else why
        self.todo_text = type(self).todo if todo is None else todo
        self.facts = dict(facts or {})
        super().__init__(self.message)

    @property
    def code(self) -> str:
        return type(self).__name__

    @property
    def message(self) -> str:
        parts = [self.what]
        if self.why_text:
            parts.append(f"Why: {self.why_text}")
        if self.todo_text:
            parts.append(f"What to do: {self.todo_text}")
        return " ".join(part if part.endswith((".", "!", "?")) else part + "." for part in parts)

    def anew(self) -> ShardyardError:
        """An equal error without a traceback or context: one that is raised again and again must not gather them."""
        return _rebuild(type(self), self.what, self.why_text, self.todo_text, self.facts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why_text, self.todo_text, self.facts))


def _rebuild(kind: type[ShardyardError], what: str, why: str, todo: str, facts: dict[str, str]) -> ShardyardError:
    return kind(what, why=why, todo=todo, facts=facts)


class InvalidRequest(ShardyardError):
    why = "the request cannot be carried out; nothing was changed"


class ConfigurationError(InvalidRequest):
    why = "the settings do not make sense"


class ShapeMismatch(InvalidRequest):
    why = "a gradient or value must have its variable's shape"
    todo = "check that all workers build the same model"


class DTypeMismatch(InvalidRequest):
    why = "a gradient or value must have its variable's dtype"
    todo = "check that all workers build the same model with the same dtypes"


class UnknownVariable(InvalidRequest):
    why = "the job has no variable of that name"
    todo = "use the names given to job.prepare or job.register"


class VariableConflict(InvalidRequest):
    why = "the first registration of a job's variables wins; all workers must register the same"
    todo = "run the same script and settings on all workers, or give the job another name"


class RateMismatch(InvalidRequest):
    why = "all logical ranks of a step must use the same optimizer settings, since they make one update"
    todo = "pass the learning-rate scheduler to job.prepare, which makes the rate a function of the job's step"


class MalformedPayload(InvalidRequest):
    why = "the bytes do not follow the protocol"
    todo = "compare the client with docs/reference/protocol.md"


class TooLarge(InvalidRequest):
    why = "the request is beyond a limit (shardyard/domain/limits.py)"


class UnsupportedOptimizer(InvalidRequest):
    why = "the servers have no kernel for it, and another optimizer would train another model"


class UnsupportedModel(InvalidRequest):
    why = "the model has something that cannot be moved to the servers"


class FeedConflict(InvalidRequest):
    why = "all workers must read the same data set in the same way, or samples would be lost or doubled"
    todo = "check that all workers see the same data set, and make the same calls of job.batches in the same order"


class UnseekableDataset(InvalidRequest):
    why = "each sample counts once an epoch, so any worker must be able to read any sample again by its index"
    todo = (
        "give a map-style dataset (with __len__ and __getitem__) or a list of files (shardyard.TextLines, FixedRecords,"
        " FramedRecords), or use a DataLoader of your own, without the promise"
    )


class ProtocolMismatch(InvalidRequest):
    why = "both ends must speak the same protocol"
    todo = "install the same release of shardyard on all machines"


class LaunchRefused(InvalidRequest):
    why = "the agent does not start programs for this caller"


class NotShareable(InvalidRequest):
    why = "memory is shared only between processes of one user on one machine, in one PID namespace"
    todo = "nothing: payloads travel over streams instead"


class TableError(InvalidRequest):
    why = "the ids, rows or settings do not fit the table; nothing was changed"


class TableFull(TableError):
    why = "a table keeps at most rows_max rows in a partition; nothing was changed"
    todo = "raise rows_max of the table, or let rows be admitted later or expire sooner"


class Refused(ShardyardError):
    """The sender is behind the times. Nothing was changed."""


class StaleIncarnation(Refused):
    why = "this process was declared dead, or the request was meant for another one; it is refused"
    todo = "start the process again; it registers as a new member"


class WorkerQuarantined(StaleIncarnation):
    why = "it kept sending gradients that are not finite (job.nonfinite_max); the other workers go on without it"
    todo = "look at its data and its device; its batches that did not count are listed by `shardyard quarantined`"


class StaleToken(Refused):
    why = "another worker has taken over this work"
    todo = "drop the work and ask for new work; job.batches does so by itself"


class StaleGeneration(Refused):
    why = "partitions have moved to other servers since the sender last asked"
    todo = "fetch the partition map and send again"


class StaleTerm(Refused):
    why = "a newer coordinator is in charge"


class SequenceGap(Refused):
    why = "a partition applies the work of a source in order"
    todo = "continue from the watermark that this error names"


class StraddlingRange(Refused):
    why = "a part of this range has been applied already; applying it whole would count that part twice"
    todo = "send the remainder as a range of its own"


class NotFound(ShardyardError):
    why = "the name or number is not known here"


class CheckpointNotFound(NotFound):
    why = "the checkpoint, or one of its files, does not exist"
    todo = "list the checkpoints with `shardyard checkpoint list`, and check --url"


class VersionPassed(NotFound):
    why = "rows change in place; servers keep those of a version while a reader holds it, as far as there is room"
    todo = "take a newer version; `with snapshot:` (docs/guides/evaluation.md) and `served.look_up` do so by themselves"


class NotReady(ShardyardError):
    why = "something else must happen first"
    todo = "ask again in a moment"


class Unavailable(ShardyardError):
    why = "a peer does not answer"


class CoordinatorUnavailable(Unavailable):
    todo = "check the address, and that `shardyard coordinator` (or `make up`) is running there"


class ServerUnavailable(Unavailable):
    todo = "see `shardyard status` for the state of the servers"


class DeadlineExceeded(Unavailable):
    why = "the answer did not come in time"


class StorageUnavailable(ShardyardError):
    why = "the storage of the checkpoints refused the request, or cannot be reached"
    todo = "free space there, or repair its permissions or its network; committed checkpoints are untouched"


class CheckpointDamaged(ShardyardError):
    why = "a file of a checkpoint differs from what was written, and nothing is restored from damaged bytes"
    todo = "list all damage with `shardyard checkpoint verify`; use another checkpoint, or a copy of the file"


class LogDamaged(ShardyardError):
    why = "a file of a server's log differs from what was written, so acknowledged pushes cannot be restored from it"
    todo = "restore the file from a copy, or go back to a checkpoint with `shardyard checkpoint restore`"


class JobFailed(ShardyardError):
    why = "the job has ended by an error"
    todo = "see the first error above it in the logs; start the script again for a new run"


class ServerLost(JobFailed):
    why = "a server died with the only copy of its partitions, and the job had no checkpoint to go back to"
    todo = (
        "start the script again, once `shardyard status` shows as many servers as there were (`up`, `run` and compose "
        "start dead ones again by themselves); with checkpoints (job.checkpoint.url) a job goes on by itself"
    )


class CoordinatorLost(JobFailed):
    why = "without a coordinator, workers cannot join or lease data, and no death is noticed"
    todo = (
        "see its log, and why it was not started again: on its state folder it finds its members and jobs as they were "
        "for membership.coordinator_grace_ms; after that start the script again"
    )


class WorkerFailed(JobFailed):
    why = "a training script raised an exception"
    todo = "see its traceback"


class NonFiniteGradient(JobFailed):
    why = "a gradient that is NaN or infinite would spoil the parameters of all workers for good"
    todo = (
        "look at the loss and the learning rate; with float16, scale the loss (job.scaler()); `job.nonfinite: skip` "
        "leaves such work out, `allow` lets it through"
    )


class AddressInUse(ShardyardError):
    why = "another process listens on this address already"
    todo = "stop the other process, or choose another port with --bind (port 0 takes a free one)"


class Internal(ShardyardError):
    why = "this is a defect of Shardyard"
    todo = "please report it with the log of that process"


def _tree(kind: type[ShardyardError]) -> dict[str, type[ShardyardError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[ShardyardError]] = _tree(ShardyardError)


def rebuild(code: str, what: str, why: str, todo: str, facts: dict[str, str]) -> ShardyardError:
    """The error that a peer sent; an unknown code (of a newer peer) becomes the plain base class."""
    return BY_CODE.get(code, ShardyardError)(what, why=why, todo=todo, facts=facts)
