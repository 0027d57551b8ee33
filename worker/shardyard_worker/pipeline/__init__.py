"""A model in stages, one or more in each worker (job.strategy pipeline).

In: a model, and batches. Out: the gradients of this worker's stages, by a schedule of torch.distributed.pipelining.
Nothing here retries, and nothing is counted: `consistency.groups` does that.

Read `cut` first: how a model becomes stages. `pipeline` says which variables a worker updates. `schedules` runs a
batch, and `process_group` sends and receives between the stages.
"""
