"""One partition: blocks of variables, their versions and the ledger of pushes. The unit of ownership and locking.

In: a push's part for this partition, with its name. Out: a new version, or a refusal that changed nothing. In a
synchronous job the push is recorded until its step is complete; in an asynchronous job it is a step by itself.

Read `ledger` first: a watermark for each source tells new pushes from duplicates and gaps. `step_gate` says when a
synchronous step is applied. `partition` leads a push through both. `dense_state` applies it to the blocks, by the
rules of `update_rules`; `staleness` corrects gradients that are late. `cuts` copies a partition for a checkpoint
while pushes go on.
"""
