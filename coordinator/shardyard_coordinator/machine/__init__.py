"""The state machine: all decisions of a yard, in one place and without I/O.

`Machine.handle(event, now_ms)` takes an event of `core` and returns effects of `core`. It is the only mutator. The same
events give the same effects, and the journal's records alone rebuild the machine after a restart.

Read `machine` first: it checks the caller and finds the job. `job_directory` has the jobs. `job` handles workers and
servers that come and go, and the passing of time. `effect_ends` says what a job does when an effect has ended.
`job_records` maps each record to the part that reads it. `job_views` has what workers and people are told.
`wait_reasons` says what each job waits for; it reads the machine and changes nothing.
"""
