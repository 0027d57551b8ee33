"""The language of the state machine: what can happen to it, and what it can ask for.

Events come in from `service`: a request, a tick of the clock, or the result of earlier I/O. They are named in the
past tense. Effects go out to `service`: write a record, call a server, reply. They are imperatives. Both are frozen
values without behaviour, so a test or the simulator can write them down and compare them.

`job_state` is the state of one job, with all its parts: what `flows` and `machine` change.

Read `events`, then `effects`. The invariant at the top of `effects` says in which order `service` carries them out.
"""
