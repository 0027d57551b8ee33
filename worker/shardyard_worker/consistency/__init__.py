"""The consistency modes: how a worker's steps fit together with those of other workers.

A strategy decides the name of the next push, the version that the model must hold while a step is computed, and when
the step is over. In: the work at hand (a data shard's batch, or a logical rank's step). Out: calls of
`training.trainer`.

Read `modes` first: which mode is which class. `strategy` is what all have in common. `asynchronous` serves the modes
async and bounded: `push_delivery` sends its pushes, `bounded` has the waits under a bound. `synchronous` serves sync:
`logical_ranks` has the ranks of this worker, `step_versions` the waits for the next version, `step_permit` the step
before which a job stops. On it build `backup_workers`, `hybrid`, `local_sgd` (several local steps for each push), and
the strategies in `groups`, whose workers compute together.
"""
