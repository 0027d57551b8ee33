"""A model whose variables are cut over the members of a group (job.strategy sharded, tensor).

In: a model, and batches. Out: the gradients of this worker's shards, by torch's FSDP2 or DTensor. Nothing here retries,
and nothing is counted: `consistency.sharded` does that.

Read `sharded_model` first: which variables a worker updates, and the copy of the model that is cut. `fully_sharded`
cuts for job.strategy sharded, `tensor_plan` and `tensor_parallel` for tensor. `shards` is the replica.
"""
