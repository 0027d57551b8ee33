"""One partition: blocks of variables, tables, their versions, and the ledger of pushes. A server owns, and locks, one
partition at a time.

In: a push's part for this partition, with its name. Out: a new version, or a refusal that changed nothing. In a
synchronous job a push is recorded until its step is complete. In an asynchronous job each push is an update.

Reading order: `partition` has the state and its two locks. `push` takes a push through it: `ledger` tells new pushes
from duplicates and gaps, `contribution` checks and unpacks payloads, `step_gate` and `sync_step` gather and apply a
synchronous step, `staleness` corrects late gradients. `next_version` makes an update visible, with the arithmetic of
`dense_state`. `reads` returns values and rows by version. `checkpoint_cuts` copies a partition for a
checkpoint while pushes go on. `update_rules` are the job's rules for all of this.
"""
