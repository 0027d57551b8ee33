"""The state that replicas publish: a partition jumps to a step that they have taken without it (ledger.md, rule D4).

In a mirrored job gradients of variables never come here. The partition holds the state of the newest step that was
published, for checkpoints, for readers, and for replicas that begin.

    without tables   publishing makes a version, so that cuts, pins and waiting pulls work as after an update
    with tables      pushes of rows make the versions; the published state replaces the variables of the version with
                     the rows of the same step

Each worker gives the variables, or the parts of variables, that it has. The partition keeps them as a draft, and takes
it when it has all bytes of one step and group. A later step or group begins another draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import RankSource, SourceKey
from shardyard.domain.replica_groups import TakenStep
from shardyard.wire.frames import Frame, Scatter
from shardyard_ps_server.partition.next_version import publish
from shardyard_ps_server.partition.partition import Partition, PublishedDraft
from shardyard_ps_server.values.versions import aligned_empty


class Publishing:
    """What one worker gives of a partition's state after `taken.step`: `add` takes its frames, and `end` follows the
    last one. `names`: of the arrays, in their order. `counts`: updates of each block; 0: the worker has nothing of it.
    `check_current` is called before anything changes. Raises InvalidRequest, TooLarge, NotReady and what
    `check_current` raises."""

    def __init__(
        self,
        partition: Partition,
        taken: TakenStep,
        counts: Sequence[int],
        names: Sequence[str],
        check_current: Callable[[], None],
    ) -> None:
        if partition.steps is None:
            raise InvalidRequest(f"a published state for partition {partition.id}, whose job has no steps")
        if VALUES not in names:
            raise InvalidRequest(f"a published state without values, of {list(names)}")
        self._partition = partition
        self._taken = taken
        self._check_current = check_current
        with partition.turn:
            self._check()
            partition.dense.slots.check(counts, [name for name in names if name != VALUES])
            if self._is_late():
                return
            draft = partition.draft
            if draft is None or draft.taken < taken:
                draft = partition.draft = _new_draft(partition, taken, names)
            if draft.taken == taken:
                if [*draft.arrays] != [*names]:
                    raise InvalidRequest(f"a published state of {list(names)}; others have given {list(draft.arrays)}")
                draft.counts = [*map(max, draft.counts, counts)]

    def add(self, frame: Frame) -> None:
        """Raises MalformedPayload for bytes beyond the arrays."""
        with self._partition.turn:
            draft = self._draft
            if draft is not None:
                draft.received.add(frame)

    def end(self) -> None:
        """Makes the draft the partition's state if it is complete: of version `taken.step`; every logical rank counts
        as having taken all steps before it."""
        partition = self._partition
        with partition.turn:
            self._check()
            draft = self._draft
            if self._is_late() or draft is None or not draft.received.complete:
                return
            partition.draft = None
            _take(partition, draft)
        partition.wake()

    @property
    def _draft(self) -> PublishedDraft | None:
        """That of this step and group, unless it was taken, or another one was begun."""
        draft = self._partition.draft
        return draft if draft is not None and draft.taken == self._taken else None

    def _check(self) -> None:
        self._check_current()
        self._partition.check_whole()
        with self._partition.lock:
            self._partition.check_unsealed()

    def _is_late(self) -> bool:
        """Whether the partition has that state, a later one, or rows of another step."""
        partition = self._partition
        with partition.lock:
            newest = partition.versions.newest.number
            return partition.published >= self._taken or (bool(partition.rows.names) and newest != self._taken.step)


def _new_draft(partition: Partition, taken: TakenStep, names: Sequence[str]) -> PublishedDraft:
    """Bytes between blocks count as received. Raises TooLarge."""
    payload = partition.payload
    memory = aligned_empty(len(names) * payload.nbytes)
    arrays = {name: memory[at * payload.nbytes :][: payload.nbytes] for at, name in enumerate(names)}
    received, ends = Scatter(memory.data), [payload.elements(block) for block in range(len(payload.blocks))]
    for at in range(len(names)):
        for (_, end), begin in zip([(0, 0), *ends], [*(begin for begin, _ in ends), payload.nbytes], strict=True):
            received.add(Frame(b"", at * payload.nbytes + end, bytes(begin - end)))
    return PublishedDraft(taken, [0] * len(payload.blocks), arrays, received)


def _take(partition: Partition, draft: PublishedDraft) -> None:
    """In the partition's turn."""
    assert partition.steps is not None
    step = draft.taken.step
    new = partition.blank()
    new[:] = draft.arrays.pop(VALUES)
    partition.dense.keep_all()
    partition.dense.begin_with(draft.counts, draft.arrays)
    with partition.lock:
        partition.published = draft.taken
        if partition.versions.newest.number == step:
            partition.versions.replace(new)
            return
        for rank in range(partition.rules.logical_ranks):
            partition.ledger.pass_over(SourceKey(RankSource(Rank(rank))), step)
        partition.steps.gate = partition.gate_at(step)
        publish(partition, new, step)
