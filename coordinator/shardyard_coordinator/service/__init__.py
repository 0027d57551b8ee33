"""The coordinator towards the outside: everything that does I/O.

In: requests over gRPC or in process. Out: replies, calls to servers, records in the journal, files of checkpoints.
What is decided comes from `machine`; this room turns requests into events and carries out effects.

- `service`: one lock around the machine, a ticker, and the order of effects. Read it first.
- `door`: messages to events, with every value checked, and answers to messages.
- `journal`: records on disk. `audit`: which of them people can read as the audit of a job.
- `server_client`: calls to servers. `checkpoint_io`: checkpoints taken and restored through them.
- `residual_collection`: workers' error feedback, collected for a checkpoint.
- `status`: the yard as `shardyard status` shows it. `process`: start and stop of the role.
"""
