"""The state that replicas publish: a partition jumps to a step that they have taken without it (ledger.md, rule D4).

In a mirrored job gradients of variables never come here. The partition holds the state of the newest step that was
published, for checkpoints, for readers, and for replicas that begin.

    without tables   publishing makes a version, so that cuts, pins and waiting pulls work as after an update
    with tables      pushes of rows make the versions; the published state replaces the variables of the version with
                     the rows of the same step

The stages of a pipeline give the state of their own variables. The partition keeps these as a draft, and takes it when
it has all blocks of one step and group. A later step or group begins another draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import RankSource, SourceKey
from shardyard.domain.replica_groups import TakenStep
from shardyard_ps_server.partition.next_version import publish
from shardyard_ps_server.partition.partition import Partition, PublishedDraft
from shardyard_ps_server.values.versions import Bytes


def take_published(
    partition: Partition,
    taken: TakenStep,
    counts: Sequence[int],
    values: Bytes,
    slots: Mapping[str, Bytes],
    check_current: Callable[[], None],
    blocks: Sequence[int] = (),
) -> None:
    """Makes this the partition's state, of version `taken.step`; every logical rank counts as having taken all steps
    before it. Does nothing if the partition has that state, a later one, or rows of another step. `blocks`: those whose
    state it is; empty: all. Raises InvalidRequest, TooLarge, NotReady and what `check_current` raises, having changed
    nothing."""
    steps = partition.steps
    if steps is None:
        raise InvalidRequest(f"a published state for partition {partition.id}, whose job has no steps")
    with partition.turn:
        check_current()
        partition.check_whole()
        with partition.lock:
            partition.check_unsealed()
            newest = partition.versions.newest.number
            if partition.published >= taken or (partition.rows.names and newest != taken.step):
                return
        partition.dense.slots.check(counts, slots)
        if blocks:
            draft = _added(partition, PublishedDraft(taken, set(blocks), list(counts), {VALUES: values, **slots}))
            if len(draft.blocks) < len(counts):
                return
            counts, slots = draft.counts, {name: array for name, array in draft.arrays.items() if name != VALUES}
            values = draft.arrays[VALUES]
        partition.draft = None
        new = partition.blank()
        new[:] = values
        partition.dense.keep_all()
        partition.dense.begin_with(counts, slots)
        with partition.lock:
            partition.published = taken
            if newest == taken.step:
                partition.versions.replace(new)
            else:
                for rank in range(partition.rules.logical_ranks):
                    partition.ledger.pass_over(SourceKey(RankSource(Rank(rank))), taken.step)
                steps.gate = partition.gate_at(taken.step)
                publish(partition, new, taken.step)
    partition.wake()


def _added(partition: Partition, given: PublishedDraft) -> PublishedDraft:
    """Adds what a stage has given to the partition's draft. Returns it."""
    draft = partition.draft
    if draft is None or draft.taken < given.taken:
        draft = partition.draft = given
    elif draft.taken == given.taken:
        for block in given.blocks:
            begin, end = partition.payload.spans[block]
            for name, array in given.arrays.items():
                draft.arrays[name][begin:end] = array[begin:end]
            draft.counts[block] = given.counts[block]
        draft.blocks |= given.blocks
    return draft
