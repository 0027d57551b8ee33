"""What `shardyard doctor` looks at. A probe changes nothing, and has a deadline, so that none can hang the command.

In: this machine, and a coordinator's address. Out: findings, one line each: ok, a warning or a failure, and what to do.

Read `findings` first: the form of a line, and the deadlines. `machine` looks at disk, shared memory, limits and
libraries. `network` looks at the way to a yard, from the name to the members; after a failed step, the steps that
depend on it are skipped.
"""
