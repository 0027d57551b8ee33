"""The state machine: all that a yard decides, in one place and without I/O.

`Machine.handle(event, now_ms)` takes an event of `core` and returns effects of `core`. It is the only mutator. The
same events give the same effects, and the journal's records alone make the same machine after a restart.

Read `machine` first: it checks who asks and finds the job. `job` is one job: its state, its parts, and the order of
things when a worker or server goes. `wait_reasons` says what each job waits for; it reads the machine and changes
nothing.
"""
