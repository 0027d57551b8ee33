"""A worker's membership in a yard: registration, heartbeats, retries, and the news that a heartbeat brings.

In: the coordinator's replies. Out: the job that this worker is in, its failure if it has failed, and the step before
which it stops. Rooms above call `Session.check`, which raises that failure.

Read `session` first. `retry` says how often and with which pauses a call is sent again. `step_barrier` is the step at
which a job stops or changes its mode, as far as this worker knows. `job_requests` asks the coordinator for a checkpoint
or for the end of the job. `interrupts` holds Ctrl-C back while a step is half done. `metrics` keeps what the script
logs until the next heartbeat, `tensorboard` writes it as event files. `devices` picks the process's device. `run_name`
says to which launch the process belongs.
"""
