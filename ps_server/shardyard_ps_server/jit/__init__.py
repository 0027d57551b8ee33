"""The server's compiled loops: on disk before the first push needs them.

In: nothing but the package's own loops. Out: machine code in numba's folder, beside the source or in
$NUMBA_CACHE_DIR. One process of a machine compiles each kind of loop once; the others wait and read it.

Read `cache` first: the marks and the lock in that folder. `optimizer_warmup` compiles the optimizers of dense
variables when a server starts. `table_warmup` compiles the loops of tables in a process of its own, so that the
server goes on.
"""
