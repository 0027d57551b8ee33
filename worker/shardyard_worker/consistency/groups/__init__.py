"""Strategies whose workers compute together, in groups that the coordinator forms (docs/internals/ledger.md, D).

In: the work at hand of logical ranks, and a group. Out: a step that all members have, or none.

Read `group_strategy` first: a worker's place in the newest group. On it build `replica_strategy`, where the variables
are in the workers, and `computed_together`, where each has a part of the model. `mirrored`: each has all variables.
`spread`: each has a part of them, and takes its part of the step, with `pipelined` and `sharded`. `pushed_sync` and
`pushed_async`: each pushes the gradients of its part to the servers. `parts` says what a part is, with `stage_part` and
`share_parts`; `work_messages` has what the first worker of an asynchronous replica tells the others.
"""
