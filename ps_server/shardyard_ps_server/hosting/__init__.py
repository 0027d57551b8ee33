"""Which jobs and partitions this server has, and who may change them.

In: requests of `service`, as domain values. Out: the outcome of a push, the values of a pull, or a refusal that
changed nothing. Incarnation, generation and term are checked here, before any partition is touched.

Read `store` first: the state that all requests share. Then the functions over it: `admission` says who may ask;
`pushes`, `pulls` and `lookups` serve workers and readers; `orders` carries out what the coordinator decides.
`hosted_job` is one job's partitions. `provisioning` makes partitions and restores them from checkpoints and logs.
`pins` holds versions for readers. `worker_clocks` makes values wait for the slowest worker (bounded staleness).
`thread_pool` applies the partitions of one push in parallel.
"""
