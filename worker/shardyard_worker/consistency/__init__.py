"""How a worker's steps fit together with those of the others, for each consistency mode.

A strategy decides what the next push is called, which version the model must hold while the step is computed, and
when the step is over. In: the work at hand (a data shard's batch, or a logical rank's step). Out: calls of
`training.trainer`.

Read `strategies` first: asynchronous, synchronous, and synchronous with backup workers. `decisions` asks the
coordinator who counts in a step with backup workers. Then the modes that build on these: `bounded` (no worker more
than so many steps ahead), `hybrid` (variables synchronous, rows asynchronous)
and `local_sgd` (several local steps for each push).
"""
