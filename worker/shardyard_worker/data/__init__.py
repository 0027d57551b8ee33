"""Which samples this worker computes next.

In: a data set and leases from the coordinator. Out: batches, each with the name of its work, so that each sample counts
once an epoch, whichever worker computes it.

Read `feed` first: one call of `job.batches`. `async_feed` leases data shards, `led_feed` does so for a whole replica,
`sync_feed` has the samples of steps, `open_feed` chooses between them. Data sets: `dataset` reads by index,
`loader_processes` in other processes; `sources` has data sets over lists of files and over streams. `seeding` derives
all randomness from the name of the work. `look_ahead` reads batches before their turn. `makeup_steps` repeats what
backup workers dropped. `given_data` is what a script says about its data, `own_data` looks at data that it reads by
itself.
"""
