"""The state machine: all decisions of a yard, in one place and without I/O.

`Machine.handle(event, now_ms)` takes an event of `core` and returns effects of `core`. The same events give the same
effects, and the journal's records alone rebuild the machine after a restart. `Machine.hear` takes reports while nothing
can be recorded.

Read `machine` first: it checks the caller and finds the job. `job_directory` has the jobs. `job` handles workers and
servers that come and go, and the passing of time. `heartbeats` takes a report and replies. `effect_ends` says what a
job does when an effect has ended. `job_records` maps each record to the part that reads it. `job_views` has what
workers and people are told. `hosts` keeps jobs that want one machine on one.
`wait_reasons` says what each job waits for; it reads the machine and changes nothing.
"""
