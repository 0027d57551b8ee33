"""Processes that read a running job and take no part in it: evaluators and serving processes.

In: the job's servers, read under pins. Out: one consistent version of the parameters and rows. Training never waits
for a reader. A reader that dies leaves only a lease behind, which runs out.

Read `evaluator` first: `sy.follow()` and its snapshots. `reader_session` asks the coordinator for the job's state.
`pinned_version` pins a version on the servers and looks rows up in it, `snapshots` reads its parameters,
`model_values` puts them into a model. `pinned_rows` gives a version's rows to a model's modules, `snapshot_rows` pins
those of the newest snapshot. `best` keeps the best version. `serving` answers requests from a version that is renewed
in the background.
"""
