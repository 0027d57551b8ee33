"""How a running job changes its rules: another consistency mode, another staleness bound, an early stop.

In: what a person or a worker asks for, and how far each worker says it has come. Out: the step before which all
workers stop or change over, and the rules that are in force until then. Servers are told by `flows.mode_switch`.

Read `step_barrier` first: it finds a step that no worker has contributed to yet. `stopping` ends a job before that
step. `drain` empties a job before it changes between synchronous and asynchronous updates. `mode_setting` changes the
rules that need no drain, first on the servers, then on the workers.
"""
