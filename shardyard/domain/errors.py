"""The tree of a yard's errors. Each says what happened, why that is an error, and what to do.

    ShardyardError
    |-- InvalidRequest              what was asked cannot be done, now or later; nothing changed
    |   |-- ConfigurationError      a settings file, an environment variable or a flag
    |   |-- ShapeMismatch  DTypeMismatch  UnknownVariable  VariableConflict  RateMismatch
    |   |-- MalformedPayload  TooLarge  QuotaExceeded  UnsupportedOptimizer  UnsupportedModel
    |   |-- FeedConflict  UnseekableDataset  ProtocolMismatch  NotShareable
    |   |-- TableError              a table of rows
    |   |   |-- TableFull
    |-- Refused                     the sender does not know something newer; it must learn it, then may continue
    |   |-- StaleIncarnation
    |   |   |-- WorkerQuarantined
    |   |-- StaleToken  StaleGeneration  StaleTerm
    |   |-- SequenceGap  StraddlingRange  RunFinished
    |-- NotFound                    no such job, partition, launch, version
    |   |-- CheckpointNotFound  VersionPassed
    |-- NotReady                    ask again later
    |-- Unavailable                 a peer does not answer
    |   |-- CoordinatorUnavailable  ServerUnavailable  DeadlineExceeded
    |-- StorageUnavailable          a disk or an object store refuses a request or cannot be reached
    |-- CheckpointDamaged           a file of a checkpoint differs from what was written
    |-- LogDamaged                  a file of a server's log differs from what was written
    |-- AuditDamaged                a line of the yard's audit was changed or removed
    |-- JobFailed                   the job ended with an error
    |   |-- ServerLost  CoordinatorLost  WorkerFailed  NonFiniteGradient
    |-- NotTrusted                  a certificate is missing, or is not of this yard
    |-- NotPermitted                the caller's role may not do this
    |-- AddressInUse
    |-- Internal                    a defect of ours

Owns: the tree, and the table of its classes by code. Must not know: gRPC (shardyard.transport.error_codes maps each
class to a status).
"""

from __future__ import annotations

from typing import ClassVar, Final

SEALED: Final = "sealed"
"""The fact of a NotReady whose partition moves to another server: soon there is another map."""


class ShardyardError(Exception):
    """Base of all errors that a yard raises.

    `what`: what happened. `why_text` and `todo_text`: the class's `why` and `todo`, unless the error has its own.
    `facts`: values for programs. `code`: the class's name, which also travels on the wire.
    """

    why: ClassVar[str] = ""
    todo: ClassVar[str] = ""
    new_process_helps: ClassVar[bool] = False
    """Whether the process has lost the yard, or its place in it, while its script and the job are well. Then an agent
    starts the process again."""

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
        # not named `message`: torch takes that for an argument when it raises the error of a loader process again
        super().__init__(self._message())

    @property
    def code(self) -> str:
        return type(self).__name__

    def _message(self) -> str:
        parts = [self.what]
        if self.why_text:
            parts.append(f"Why: {self.why_text}")
        if self.todo_text:
            parts.append(f"What to do: {self.todo_text}")
        return " ".join(part if part.endswith((".", "!", "?")) else part + "." for part in parts)

    def anew(self) -> ShardyardError:
        """An equal error without traceback and context. An error that is raised many times would collect them."""
        return _rebuild(type(self), self.what, self.why_text, self.todo_text, self.facts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why_text, self.todo_text, self.facts))


def _rebuild(kind: type[ShardyardError], what: str, why: str, todo: str, facts: dict[str, str]) -> ShardyardError:
    return kind(what, why=why, todo=todo, facts=facts)


class InvalidRequest(ShardyardError):
    why = "the request cannot be carried out; nothing was changed"


class ConfigurationError(InvalidRequest):
    why = "a setting, a flag or an environment variable has a value that cannot be used"


class ShapeMismatch(InvalidRequest):
    why = "a gradient or value must have the shape of its variable"
    todo = "check that all workers build the same model"


class DTypeMismatch(InvalidRequest):
    why = "a gradient or value must have the dtype of its variable"
    todo = "check that all workers build the same model with the same dtypes"


class UnknownVariable(InvalidRequest):
    why = "the job has no variable of this name"
    todo = "use the names that were given to job.prepare or job.register"


class VariableConflict(InvalidRequest):
    why = "all workers must register the same variables, and the first registration decides which"
    todo = "run the same script with the same settings on all workers, or give the job another name"


class RateMismatch(InvalidRequest):
    why = "all logical ranks of a step must use the same optimizer settings, because together they make one update"
    todo = "pass the learning-rate scheduler to job.prepare, which computes the rate from the step of the job"


class MalformedPayload(InvalidRequest):
    why = "the bytes do not follow the protocol"
    todo = "compare the client with docs/reference/protocol.md"


class TooLarge(InvalidRequest):
    why = "the request is larger than a limit allows (shardyard/domain/limits.py)"
    todo = "make it smaller, or split it"


class QuotaExceeded(InvalidRequest):
    why = "each owner has a quota of the yard, so that one does not starve the others"
    todo = "wait for another job of this owner to end, or have the quota raised where the coordinator is started"


class UnsupportedOptimizer(InvalidRequest):
    why = "the servers cannot compute its updates, and another optimizer would train another model"
    todo = "use an optimizer that docs/guides/optimizers.md lists"


class UnsupportedModel(InvalidRequest):
    why = "a part of the model cannot be moved to the servers"
    todo = "change this part of the model"


class FeedConflict(InvalidRequest):
    why = "all workers must read the same data set in the same way; otherwise samples would be lost or counted twice"
    todo = (
        "check that all workers have the same data set and call job.batches in the same order with the same arguments; "
        "make random data after sy.connect and before job.prepare, where all workers have the job's seed"
    )


class UnseekableDataset(InvalidRequest):
    why = "each sample counts once in an epoch, so any worker must be able to read any sample again by its index"
    todo = (
        "give a map-style dataset (with __len__ and __getitem__), a list of files (shardyard.TextLines, FixedRecords, "
        "FramedRecords), or a stream that can begin anew (shardyard.StreamDataset(stream, samples=N)); or go through a "
        "DataLoader of your own, without this promise"
    )


class ProtocolMismatch(InvalidRequest):
    why = "both sides must speak the same protocol"
    todo = "install the same release of shardyard on all machines"


class NotShareable(InvalidRequest):
    why = "memory and local sockets can be shared only between processes of one user on one machine"
    todo = "do nothing: the data travels over the network instead"


class TableError(InvalidRequest):
    why = "the ids, rows or settings do not fit the table; nothing was changed"
    todo = "correct them"


class TableFull(TableError):
    why = "a table holds at most rows_max rows in each partition; nothing was changed"
    todo = "raise rows_max of the table, admit rows later, or let them expire sooner"


class Refused(ShardyardError):
    """The sender does not know something newer. Nothing was changed."""


class StaleIncarnation(Refused):
    new_process_helps = True
    why = "this process was declared dead, or the request was meant for another process"
    todo = "start the process again; it registers as a new member"


class WorkerQuarantined(StaleIncarnation):
    new_process_helps = False
    why = (
        "the worker sent too many gradients in a row that are not finite (job.nonfinite_max); the other "
        "workers continue without it"
    )
    todo = "check its data and its device; `shardyard quarantined` lists its batches that did not count"


class StaleToken(Refused):
    why = "another worker has taken over this work"
    todo = "drop the work and ask for new work; job.batches does this by itself"


class StaleGeneration(Refused):
    why = "partitions have moved to other servers since the sender last asked where they are"
    todo = "fetch the partition map and send the request again"


class StaleTerm(Refused):
    why = "a newer coordinator is in charge"
    todo = "stop the older coordinator; the members follow the newer one"


class SequenceGap(Refused):
    why = "a partition applies the work of a source in order, and work before this is missing"
    todo = "continue from the watermark that this error names"


class StraddlingRange(Refused):
    why = "a part of this range was applied already; applying all of it would count that part twice"
    todo = "send the rest as a range of its own"


class RunFinished(Refused):
    why = "the job of this launch has done its work; to join again would train all of it again"
    todo = (
        "do nothing if this process was started again after the end: shardyard.connect ends it with exit code 0; for a "
        "new run start a new launch, or set another SHARDYARD_RUN_ID"
    )


class NotFound(ShardyardError):
    why = "nothing here has this name or number"
    todo = "check the name or number; `shardyard status` lists jobs and members"


class CheckpointNotFound(NotFound):
    why = "the checkpoint, or one of its files, does not exist"
    todo = "list the checkpoints with `shardyard checkpoint list`, and check --url"


class VersionPassed(NotFound):
    why = "rows change in place; a server keeps the rows of a version only while a reader holds it and memory is left"
    todo = (
        "read a newer version; `with snapshot:` (docs/guides/evaluation.md) and `served.look_up` do this by themselves"
    )


class NotReady(ShardyardError):
    new_process_helps = True
    why = "something else must happen first"
    todo = "ask again in a moment"


class Unavailable(ShardyardError):
    new_process_helps = True
    why = "the other process does not answer"
    todo = "check that it runs and that its address can be reached; then try again"


class CoordinatorUnavailable(Unavailable):
    todo = "check the address, and that `shardyard coordinator` (or `make up`) runs there"


class ServerUnavailable(Unavailable):
    todo = "run `shardyard status`, which shows the state of the servers"


class DeadlineExceeded(Unavailable):
    why = "the answer did not come in time"


class StorageUnavailable(ShardyardError):
    why = "the storage refused the request or cannot be reached"
    todo = "free space there, or repair its permissions or its network; checkpoints that are complete are not affected"


class CheckpointDamaged(ShardyardError):
    why = "a file of a checkpoint is not what was written, and nothing is restored from changed bytes"
    todo = (
        "run `shardyard checkpoint verify`, which lists all damage; then use another checkpoint, or a copy of the file"
    )


class LogDamaged(ShardyardError):
    why = "a file of a server's log is not what was written, so acknowledged pushes cannot be restored from it"
    todo = "replace the file by a copy, or go back to a checkpoint with `shardyard checkpoint restore`"


class AuditDamaged(ShardyardError):
    why = "each line of the audit has the digest of the line before it, and here one differs"
    todo = "keep the file as it is, and compare it with a copy; if it is moved away, the coordinator begins a new one"


class JobFailed(ShardyardError):
    why = "the job ended with an error"
    todo = "read the first error above this one in the logs; then start the script again, as a new run"


class ServerLost(JobFailed):
    why = "a server died with the only copy of its partitions, and the job has no checkpoint to go back to"
    todo = (
        "start the script again when `shardyard status` shows all servers (`up`, `run` and compose restart "
        "dead ones by themselves); with checkpoints (job.checkpoint.url) a job continues by itself"
    )


class CoordinatorLost(JobFailed):
    new_process_helps = True
    why = "without a coordinator, workers cannot join or lease data, and no death is noticed"
    todo = (
        "read its log to see why it was not started again; on the same state folder and within "
        "membership.coordinator_grace_ms it continues with its members and jobs; later, start the script "
        "again"
    )


class WorkerFailed(JobFailed):
    why = "a training script raised an exception"
    todo = "read its traceback: `shardyard logs` shows what a script has printed that an agent runs"


class NonFiniteGradient(JobFailed):
    why = "a gradient that is NaN or infinite would destroy the parameters of all workers"
    todo = (
        "check the loss and the learning rate; with float16, scale the loss (job.scaler()); `job.nonfinite: "
        "skip` leaves such work out, `allow` applies it"
    )


class NotTrusted(ShardyardError):
    why = "every process of a yard shows a certificate that the yard's coordinator has signed"
    todo = (
        "run `shardyard invite --role ROLE` where the yard was started, and on this machine the line that it prints; "
        "docs/guides/security.md"
    )


class NotPermitted(ShardyardError):
    why = (
        "the certificate of a process says its role, and each role may do what it is for (shardyard/security/roles.py)"
    )
    todo = "use a certificate of a role that may do it: `shardyard invite --role ROLE` makes one"


class AddressInUse(ShardyardError):
    why = "another process already listens on this address"
    todo = "stop that process, or choose another port with --bind (port 0 takes a free one)"


class Internal(ShardyardError):
    why = "this is a defect of Shardyard"
    todo = "report it, with the log of that process"


def _tree(kind: type[ShardyardError]) -> dict[str, type[ShardyardError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[ShardyardError]] = _tree(ShardyardError)


def rebuild(code: str, what: str, why: str, todo: str, facts: dict[str, str]) -> ShardyardError:
    """The error that a peer sent. A code that this release does not know becomes the base class."""
    return BY_CODE.get(code, ShardyardError)(what, why=why, todo=todo, facts=facts)
