"""How a worker's steps fit together with those of the others, for each consistency mode.

A strategy decides what the next push is called, which version the model must hold while the step is computed, and
when the step is over. In: the work at hand (a data shard's batch, or a logical rank's step). Out: calls of
`training.trainer`.

Read `modes` first: which mode is which class. `strategy` is what all have in common. `asynchronous` serves the modes
async and bounded, and `bounded` says why a bounded worker waits. `synchronous` serves sync, with `logical_ranks`, which
it computes. On it build `backup_workers`, `hybrid`, and `local_sgd` (several local steps for each push).
"""
