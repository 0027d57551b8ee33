"""What the first worker of an asynchronous replica tells the others arrives as it was told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.ids import Token
from shardyard.domain.limits import SEQUENCE_MAX
from shardyard.domain.push_names import DataLease, DataShardSource
from shardyard_worker.consistency.groups.work_messages import NUMBERS, Told, WorkMessage

NUMBER = st.integers(0, SEQUENCE_MAX)
LEASES = st.builds(
    DataLease,
    st.builds(DataShardSource, NUMBER, NUMBER, NUMBER),
    st.builds(Token, NUMBER),
    NUMBER,
    NUMBER,
    NUMBER,
)


OF_WORK = st.sampled_from([Told.BATCH, Told.EMPTY])


@given(st.builds(WorkMessage, OF_WORK, LEASES, NUMBER, NUMBER, NUMBER, st.booleans()))
def test_a_message_is_what_it_was(message: WorkMessage) -> None:
    numbers = message.numbers()
    assert numbers.shape == (NUMBERS,)
    assert WorkMessage.of(numbers) == message


@pytest.mark.parametrize("told", [Told.ANSWERED, Told.WAITS, Told.ENDS])
def test_a_message_without_work_has_the_same_size(told: Told) -> None:
    message = WorkMessage(told)
    assert message.numbers().shape == (NUMBERS,)
    assert WorkMessage.of(message.numbers()) == message
