"""The coordinator towards the outside: everything that does I/O.

In: requests over gRPC or in process. Out: replies, calls to servers, records in the journal, files of checkpoints.
What is decided comes from `machine`; this room turns requests into events and carries out effects.

- `mailbox`: the machine and its journal behind one lock, and the order of writing. Read it first.
- `rpcs`: one row per RPC: its request becomes an event, the machine's answer its reply.
- `server_calls`: effects carried out on a pool of threads. `server_client`: one call to a server each, with
  `ledger_replies`. `checkpoint_io`: checkpoints taken and restored through them.
- `journal`: records on disk. `disk_watch`: whether that disk is full. `audit`: which records people can read as the
  audit of a job.
- `residual_collection`: workers' error feedback, collected for a checkpoint.
- `status`: the yard as `shardyard status` shows it. `service`: the parts put together, and
  the ticker. `process`: start and stop of the role.
"""
