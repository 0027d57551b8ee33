"""What happens to one job over several events, each flow in a file of its own.

A flow is functions over `core.job_state.JobState`. It decides in which order the parts of a job change. It takes the
facts of an event, changes the parts (of `work`, `modes`, `storage`, `members` and `placement`), and returns effects. It
keeps no state and does no I/O. A flow imports only flows that stand below it in this list:

- `deployment`: variables are registered, created on servers and given first values.
- `leasing`: workers get data shards. `last_step`: the step before which all workers stop, or change the mode.
- `replication`: workers of a mirrored job form groups, and give the servers their state.
- `work_verdicts`: which results count. `mode_switch`: the consistency mode of a running job changes.
- `job_end`: the last checkpoint, and the end.
- `departure`: partitions of a server that leaves in order go to others.
- `recovery`: lost partitions, and the way back to a checkpoint.
- `checkpointing`: when a checkpoint is taken, and what the newest one has.
- `fencing`: the work of a lost worker becomes free. `lost_pushes`, `residuals`: what a recovery has lost, and which
  worker takes up which residual.
"""
