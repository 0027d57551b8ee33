"""The server's compiled loops: loaded before the first push needs them.

In: a job's layout, and its rules for gradients. Out: the loops that this job needs, as machine code in this process. A
loop is compiled once on a machine, to numba's folder (beside the source, or $NUMBA_CACHE_DIR); other processes load it
from there. A loop that no job needs is not compiled.

Read `job_loops` first: a job is opened when its loops are loaded. `optimizer_warmup` says which loops an optimizer
needs, and loads them in a thread. `table_warmup` compiles the loops of tables in a process of its own, since they take
half a minute. `cache` has the lock and the marks in numba's folder.
"""
