"""The server's compiled loops: which ones a job needs, and how they are loaded before its first push.

In: a job's layout, and its rules for gradients. Out: the loops that this job needs, as machine code in this process. A
loop is compiled once on a machine, into numba's folder (beside the source, or $NUMBA_CACHE_DIR). Other processes load
it from there. A loop that no job needs is not compiled.

Read `job_loops` first: it loads a job's loops in a thread, and the job is opened when they are there.
`optimizer_warmup` lists the loops of an optimizer, and loads them. `table_warmup` compiles the loops of tables in a
process of its own, because they take half a minute. `__main__` compiles all of both.
`cache` has the lock and the marks in numba's folder.
"""
