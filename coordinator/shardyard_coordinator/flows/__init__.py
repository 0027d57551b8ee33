"""What happens to one job over several events, each flow in a file of its own.

A flow decides in which order the parts of a job change. It takes the facts of an event, changes the job's books (in
`work`, `modes`, `storage` and `members`), and returns effects. It keeps little state of its own and does no I/O.

In the order of a job's life:

- `deployment`: variables are registered, created on servers and given first values.
- `leasing`: workers get data shards or logical ranks. `work_verdicts`: which results count.
- `checkpointing`: checkpoints, and the recovery of lost partitions.
- `lost_pushes`, `residual_flow`: what a recovery has lost, and which worker takes up which residual.
- `mode_switch`: the consistency mode of a running job changes. `readers`: evaluators hold values.
- `job_end`: the last checkpoint, and the end.
"""
