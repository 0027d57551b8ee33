"""The write-ahead log: a push is durable before it is visible, and visible before it is acknowledged.

In: pushes, verdicts and tokens, as they were received. Out: after a crash, partitions with the same bits.
docs/internals/ledger.md has the rules (C1, C2).

Read `wal` first: append, sync, then take a turn. `records` is the form of a record, `row_records` that of table rows
in one. `segments` says where logs are stored and how a successor takes one over. `replay` rebuilds partitions.
"""
