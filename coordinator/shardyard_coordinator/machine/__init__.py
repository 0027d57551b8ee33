"""The state machine: all that a yard decides, in one place and without I/O.

`Machine.handle(event, now_ms)` takes an event of `core` and returns effects of `core`. It is the only mutator. The
same events give the same effects, and the journal's records alone make the same machine after a restart.

Read `machine` first: it checks the caller and finds the job. `job_directory` has the jobs. `job_events` says which
function handles which event of a job, `job` what happens when workers and servers come and go and as time passes,
`job_records` which part takes which record, `job_views` what workers and people are told. `wait_reasons` says what each
job waits for; it reads the machine and changes nothing.
"""
