"""How a running job changes its rules: another consistency mode, another staleness bound, an early stop.

In: what a person or a worker requests, and how far each worker reports to be. Out: the step before which all workers
stop or change the mode, and the rules that are in force until then. `flows.mode_switch` tells the servers.

Read `step_barrier` first: it finds a step to which no worker has contributed yet. `stopping` ends a job before that
step. `pending_switch` halts a job before it changes between synchronous and asynchronous updates. `mode_setting`
changes the rules that need no halt, first on the servers, then on the workers.
"""
