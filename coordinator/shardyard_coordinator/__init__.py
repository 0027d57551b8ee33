"""The coordinator: the one process of a yard that decides. It holds no values and no gradients.

Rooms, from top to bottom. A room imports only rooms below it; flows also know `machine.job`, whose parts they order.

- `service`: gRPC requests, the journal, calls to servers, checkpoint files. All I/O is here.
- `machine`: the state machine, `handle(event, now_ms) -> effects`, and one `Job` for each job.
- `flows`: what a job does in several steps: start, lease, checkpoint, recover, change its mode, end.
- `core`: the events and effects of the machine, as plain values.
- `modes`: consistency modes, and the stops and drains of a running job.
- `storage`: which checkpoints exist and what is recovered from them. `work`: whose each sample is. `members`: who
  lives.
- `placement`: where variables and tables lie.
- `records`: the form of the journal's records.

Start with `core/events.py` and `core/effects.py`, then `machine/machine.py`.
"""
