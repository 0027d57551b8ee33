"""The worker: the library in a training process, and the agent that starts training processes.

Rooms, from top to bottom. A room imports only rooms below it.

- `job`: what `sy.connect()` returns. `reader`: what `sy.follow()` returns, for evaluation and serving.
- `data`: `job.batches`. Which samples this worker computes next.
- `consistency`: what a push is called, which version it is computed on, and when a step is over.
- `replicas`: the variables of a mirrored job in this worker, and the sums of gradients over its workers.
- `training`: the model's variables and tables in the job, from gradients to new values.
- `compression`: codes for gradients, and the error feedback that stays here.
- `exchange`: one push and pull, cut into a request for each server.
- `optimizers`: torch optimizers as settings of the servers. `embedding`: modules that look up rows.
- `rows`: ids and rows on their way: each id once, coded, cached, read ahead.
- `session`: membership, retries and interrupts. `agent`: a process of its own, without torch.

Follow one step: `data/async_feed.py`, `consistency/asynchronous.py`, `training/trainer.py`, `exchange/server_group.py`.
"""
