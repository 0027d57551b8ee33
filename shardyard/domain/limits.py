"""Bounds. Whatever a peer sends is held against these before memory is allocated for it."""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

PROTOCOL: Final = 1

FRAME_BYTES: Final = 1 * MIB
"""Payload of a frame that we send."""
FRAME_BYTES_MAX: Final = 8 * MIB
"""Payload of a frame that we take."""
MESSAGE_BYTES_MAX: Final = 16 * MIB
"""Any gRPC message, both directions."""
PUSH_BYTES_MAX: Final = 16 * GIB
"""One push to one server, all parts."""

SHARED_BYTES_MAX: Final = 1 << 46
"""One region of shared memory; it is mapped, not allocated."""
NONCE_BYTES: Final = 32
CODING_CHARACTERS_MAX: Final = 2_048
CODE_HEAD_BYTES_MAX: Final = 64
"""What a block's code may be longer than its elements as they are."""
EXCHANGE_STREAMS_MAX: Final = 448
"""PushPull streams that stay open at a server between exchanges; those beyond end after each."""

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
LOGICAL_RANKS_MAX: Final = 4_096
STALENESS_MAX: Final = 1_000_000
SOURCES_PER_REQUEST_MAX: Final = 65_536
SEQUENCE_MAX: Final = (1 << 63) - 1
"""The last sequence that a name may have, so that the one after it still fits on the wire."""
LEDGER_SOURCES_MAX: Final = 10_000_000
"""Sources in the ledger of one partition."""
BLOCK_ELEMENTS_MAX: Final = 1 << 30
"""Elements of one block that a codec takes."""
BLOCK_ALIGN_BYTES: Final = 64
"""Each block of a partition's payload is filled up to a multiple of this."""

TABLE_DIM_MAX: Final = 65_536
"""Elements of one row of a table."""
TABLE_ROWS_MAX: Final = (1 << 30) - 1
"""Rows of a table in one partition."""
FREQUENCY_MAX: Final = 0xFFFF
"""A row that was pushed more often counts as pushed so often."""
TABLES_MAX: Final = 1_024
"""Tables of a job."""
ROWS_FILE_BYTES_MAX: Final = 256 * MIB
"""One file with rows of a checkpoint; a table has as many as it needs."""
ROWS_FILES_MAX: Final = 1_000_000
"""Such files of one table in one partition."""
LOOK_UP_IDS_MAX: Final = 1 << 26
"""Ids of one look-up, repeated ones among them."""
ROWS_PER_PART_MAX: Final = 1 << 24
"""Rows of a table that one push has for one partition."""
ROW_COUNT_BYTES: Final = 2
"""How often an id occurred, where a push says so."""
ROW_BYTES_MAX: Final = 4 * GIB
"""Of the rows of one push to one server, with their ids."""
ROWS_ANSWERED_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Of the answer to one look-up."""
ROWS_ALONG_BYTES_MAX: Final = 256 * MIB
"""Of the rows that one exchange brings with the values."""
ROWS_ROOM_BYTES: Final = 64 * MIB
"""Of rows that a worker pushes to a server on its machine through shared memory, and of those that it gets there; more
travel over the stream."""
TABLE_ADDRESS_BYTES: Final = 1 << 45
"""Of address space for the rows of all tables of a job at one server."""
TABLE_SEED_MAX: Final = (1 << 63) - 1

JOB_NAME_CHARACTERS_MAX: Final = 128
JOBS_MAX: Final = 1_024
MEMBERS_MAX: Final = 16_384
METRICS_MAX: Final = 64
METRIC_NAME_CHARACTERS_MAX: Final = 128
TEXT_CHARACTERS_MAX: Final = 4_096
SETTINGS_BYTES_MAX: Final = 64 * KIB
FEEDS_MAX: Final = 100_000
"""Calls of job.batches in one job."""
SAMPLES_MAX: Final = 1 << 48
EPOCHS_MAX: Final = 1_000_000
BATCH_SIZE_MAX: Final = 1 << 24
ACCUMULATE_MAX: Final = 1 << 16
"""Batches whose gradients make one push."""
LOCAL_STEPS_MAX: Final = 1_000_000
"""Steps of a round in local mode."""
TABLE_TIME_MS_MAX: Final = (1 << 47) - 1
"""By the clock of a table that tells ages in time: four thousand years."""
CACHED_ROWS_BYTES_MAX: Final = 1 << 40
CACHED_ROWS_STEPS_MAX: Final = 1_000
"""Steps after its own for which a worker uses a row that it has read."""
ROWS_IN_FLIGHT_MAX: Final = 64
"""Steps before its own for which rows are looked up in hybrid mode; their batches are held meanwhile."""

PULL_WAIT_MS_MAX: Final = 1_000
"""How long a server holds a pull; then it answers NotYet (rule C6)."""
PINS_MAX: Final = 32
"""Versions of a job that readers hold at one server at a time; each takes the memory of one version."""
HELD_ROWS_BYTES_MAX: Final = 256 * MIB
"""Rows of tables that a server keeps for one pin, as they were at its version, all partitions of the job together."""
CACHED_ROWS_MAX: Final = 1 << 28
"""Rows of one table that a process keeps beside it."""
RANDOM_NAME_BYTES: Final = 16
"""By which a reader and its pins are known."""
PIN_LEASE_MS_MAX: Final = 60_000
"""For how long a reader that is not heard holds a version."""
READERS_MAX: Final = 64
"""Readers that follow one job."""
CHECKPOINT_WAIT_MS_MAX: Final = 600_000
"""How long a server may wait for the step of a checkpoint."""
EXPLAIN_WAIT_MS: Final = 5_000
"""A wait longer than this says what it waits for (promise 7)."""
SHOW_WAIT_MS: Final = 1_000
"""`status` shows a wait that has lasted for so long."""
WAITS_CHARACTERS_MAX: Final = 1_000
"""Of the text in which a member tells its waits."""

LAUNCH_WORKERS_MAX: Final = 1_024
LAUNCH_EVENTS_MAX: Final = 100_000
OUTPUT_LINE_CHARACTERS_MAX: Final = 16_384
