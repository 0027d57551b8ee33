"""What every process needs: logging, a clock, waits that say what they wait for, budgets of restarts, and failpoints.

In: log records, and reasons to wait. Out: log lines, each with role, id, job and step; a warning when a wait is long.
Imports the domain alone. No torch, no gRPC.

Read `waits` first: how a wait says what it waits for. `log` has the two formats of log lines. `clock` has the
clock as a protocol, and the real one. `restart_policy` says whether and when a dead process starts again. `failpoints`
has named places where tests end, fail or delay a process. `malloc` keeps freed message buffers mapped.
"""
