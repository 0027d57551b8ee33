"""Processes that read a running job and take no part in it: evaluators and serving processes.

In: the job's servers, read under pins. Out: one consistent version of the parameters and rows. Training never waits
for a reader, and a reader that dies leaves nothing behind but a lease that runs out.

Read `evaluator` first: `sy.follow()` and its snapshots. `reader_session` asks the coordinator where the job stands.
`pinned_version` holds a version on the servers and looks rows up in it, `snapshots` reads its parameters,
`pinned_rows` gives its rows to the modules of a model. `serving` answers requests from a version that is renewed in
the background.
"""
