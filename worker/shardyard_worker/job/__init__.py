"""A job as a training script sees it: `sy.connect()`, `job.prepare`, `job.batches`, `job.log`.

In: the script's model, optimizer, data set and settings. Out: the same objects, prepared, which push and pull when
the script calls `optimizer.step()`. Nothing is decided here that a lower room can decide: `job` joins them.

Read `job` first: what a script sees. `membership` has the part without training: the job's name, step and stop, and how
it is left; `job_data` has the data. `connect` joins a job. `prepare` moves a model's optimizer to the servers,
`train_step` computes a batch and takes its step, `variables` trains without a model, `batches` iterates over data,
`sampler` gives its indices to a DataLoader, `training_loop` has the steps. `callbacks` calls the script's own functions
between two steps, `early_stopping` stops a job when a metric gets no better.
"""
