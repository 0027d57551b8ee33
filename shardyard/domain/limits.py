"""Limits. What another process sends is checked against them before memory is allocated for it."""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

PROTOCOL: Final = 1

FRAME_BYTES: Final = 1 * MIB
"""The payload of a frame that we send."""
FRAME_BYTES_MAX: Final = 8 * MIB
"""The payload of a frame that we accept."""
MESSAGE_BYTES_MAX: Final = 16 * MIB
"""Any gRPC message, in both directions."""
PLANS_MAX: Final = 8
"""Headers of one stream that later exchanges may name."""
PUSH_BYTES_MAX: Final = 16 * GIB
"""One push to one server, with all its parts."""

SHARED_BYTES_MAX: Final = 1 << 46
"""One region of shared memory. It is mapped, not allocated."""
CODING_CHARACTERS_MAX: Final = 2_048
CODE_HEAD_BYTES_MAX: Final = 64
"""How much longer the code of a block may be than its elements."""
EXCHANGE_STREAMS_MAX: Final = 448
"""PushPull streams that stay open at a server between exchanges. Further streams end after each exchange."""

VARIABLES_MAX: Final = 100_000
DIMENSIONS_MAX: Final = 32
VARIABLE_NAME_CHARACTERS_MAX: Final = 512
VARIABLE_BYTES_MAX: Final = 64 * GIB
JOB_BYTES_MAX: Final = 1024 * GIB
LOG_BYTES_MAX: Final = 1024 * GIB
GROUPS_MAX: Final = 10_000
PARTITIONS_MAX: Final = 4_096
BLOCKS_MAX: Final = 250_000
"""Blocks of a job."""
SLOTS_MAX: Final = 16
"""State arrays of an optimizer, for each parameter."""
LOGICAL_RANKS_MAX: Final = 4_096
STALENESS_MAX: Final = 1_000_000
SOURCES_PER_REQUEST_MAX: Final = 65_536
SEQUENCE_MAX: Final = (1 << 63) - 1
"""Sequences and tokens. The last sequence of a push is below it, so that the next one fits into a checkpoint too."""
LEDGER_SOURCES_MAX: Final = 10_000_000
"""Sources in the ledger of one partition."""
BLOCK_ELEMENTS_MAX: Final = 1 << 30
"""Elements of one block for a codec."""
BLOCK_ALIGN_BYTES: Final = 64
"""Each block in the payload of a partition is padded to a multiple of this."""

TABLE_DIM_MAX: Final = 65_536
"""Elements of one row of a table."""
TABLE_ROWS_MAX: Final = (1 << 30) - 1
"""Rows of a table in one partition."""
FREQUENCY_MAX: Final = 0xFFFF
"""The highest frequency of a row that is counted."""
TABLES_MAX: Final = 1_024
"""Tables of a job."""
ROWS_FILE_BYTES_MAX: Final = 256 * MIB
"""One file with rows in a checkpoint. A table has as many files as it needs."""
ROWS_FILES_MAX: Final = 1_000_000
"""Files with rows of one table in one partition."""
LOOK_UP_IDS_MAX: Final = 1 << 26
"""Ids of one look-up, including repeated ones."""
ROWS_PER_PART_MAX: Final = 1 << 24
"""Rows of one table for one partition in one push."""
ID_BYTES: Final = 8
ROW_COUNT_BYTES: Final = 2
"""The bytes of the count of an id, if a push has counts."""
ROW_BYTES_MAX: Final = 4 * GIB
"""The rows of one push to one server, with their ids."""
ROWS_ANSWERED_BYTES_MAX: Final = FRAME_BYTES_MAX
"""The answer to one look-up."""
ROWS_ALONG_BYTES_MAX: Final = 256 * MIB
"""The requested rows of one exchange."""
ROWS_ROOM_BYTES: Final = 64 * MIB
"""The rows that a worker and a server on one machine pass through shared memory, in each direction. Further rows travel
over the stream."""
TABLE_ADDRESS_BYTES: Final = 1 << 45
"""The address space for the rows of all tables of a job at one server."""
TABLE_SEED_MAX: Final = (1 << 63) - 1

JOB_NAME_CHARACTERS_MAX: Final = 128
JOBS_MAX: Final = 1_024
RUN_ID_CHARACTERS_MAX: Final = 256
RUN_NUMBER_MAX: Final = 1_000_000
MEMBERS_MAX: Final = 16_384
METRICS_MAX: Final = 64
METRIC_NAME_CHARACTERS_MAX: Final = 128
TEXT_CHARACTERS_MAX: Final = 4_096
SETTINGS_BYTES_MAX: Final = 64 * KIB
DATA_LEASES_MAX: Final = 64
"""Data shards that a worker holds at a time, those that it reads ahead included."""
FEEDS_MAX: Final = 100_000
"""Calls of job.batches in one job."""
SAMPLES_MAX: Final = 1 << 48
EPOCHS_MAX: Final = 1_000_000
BATCH_SIZE_MAX: Final = 1 << 24
ACCUMULATE_MAX: Final = 1 << 16
"""Batches whose gradients are accumulated into one push."""
LOCAL_STEPS_MAX: Final = 1_000_000
"""Steps of a round in local mode."""
TABLE_TIME_MS_MAX: Final = (1 << 47) - 1
"""The largest time on the clock of a table: four thousand years."""
CACHED_ROWS_BYTES_MAX: Final = 1 << 40
CACHED_ROWS_STEPS_MAX: Final = 1_000
"""How many steps later a worker may still use a row that it has read."""
ROWS_IN_FLIGHT_MAX: Final = 64
"""How many steps ahead rows are looked up in hybrid mode. The batches of these steps are kept meanwhile."""

PULL_WAIT_MS_MAX: Final = 1_000
"""How long a server holds a pull before it answers NotYet (rule C6)."""
PINS_MAX: Final = 32
"""Versions of a job that readers hold at one server at a time. Each takes the memory of one version."""
HELD_ROWS_BYTES_MAX: Final = 256 * MIB
"""Rows of tables that a server keeps for one pin, in all partitions of the job."""
CACHED_ROWS_MAX: Final = 1 << 28
"""Rows of one table in the cache of a process."""
RANDOM_NAME_BYTES: Final = 16
"""The names of readers and of their pins."""
PIN_LEASE_MS_MAX: Final = 60_000
"""How long a version is held for a reader that does not answer."""
READERS_MAX: Final = 64
"""Readers of one job."""
CHECKPOINT_WAIT_MS_MAX: Final = 600_000
"""How long a server may wait for the step of a checkpoint."""
EXPLAIN_WAIT_MS: Final = 5_000
"""A wait that lasts longer says in the log what it waits for (promise 7)."""
SHOW_WAIT_MS: Final = 1_000
"""`status` shows waits that have lasted longer."""
WAITS_CHARACTERS_MAX: Final = 1_000
"""The text with the waits of a member."""

LAUNCH_WORKERS_MAX: Final = 1_024
LAUNCH_EVENTS_MAX: Final = 100_000
OUTPUT_LINE_CHARACTERS_MAX: Final = 16_384
