"""Replicas of a job's variables, one in each worker (job.strategy mirrored, multi_worker_mirrored).

In: gradients of this worker's logical ranks. Out: the mean gradient over all ranks, by an all-reduce of
torch.distributed among the members of a group that the coordinator has formed, and a step of the script's own
optimizer. Nothing here retries: a group that has lost a member is left, and the next one continues.

Read `replica` first: the variables and the optimizer's state, and how they are copied. `gradient_buckets` sums
gradients, and sends them while the backward goes on; `buckets` says which kind of them a job has. `publishing` gives
the servers the state, for checkpoints and readers; `consistency.groups.mirrored` puts them together. How members reach
each other is in `collectives`.
"""
