"""The coordinator: the one process of a yard that makes decisions. It holds no values and no gradients.

Folders, from top to bottom. A folder imports only folders below it; flows also know `machine.job`, which calls them in
order.

- `service`: gRPC requests, the journal, calls to servers, checkpoint files. All I/O is here.
- `machine`: the state machine, `handle(event, now_ms) -> effects`, and one `Job` for each job.
- `flows`: what a job does in several steps: start, lease, checkpoint, recover, change its mode, end.
- `core`: the events and effects of the machine, as plain values.
- `modes`: consistency modes, and how a running job stops or changes its mode.
- `storage`: which checkpoints exist and what is recovered from them.
- `work`: which worker has which samples.
- `members`: which processes live.
- `placement`: on which servers variables and tables are.
- `records`: the form of the journal's records.

Start with `core/events.py` and `core/effects.py`, then `machine/machine.py`.
"""
