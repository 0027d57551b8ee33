"""What a script would cost under each strategy, before it is run (`shardyard plan`).

In: a script. Out: sizes of its model and optimizer, bytes per process and step. Must not know: processes.

- `dry_run`: runs a script until its job.prepare, without memory for its parameters.
- `costs`: memory and traffic under each strategy, and which one is chosen.
"""
