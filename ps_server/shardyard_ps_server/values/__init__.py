"""Dense values: their versions in memory, and the arithmetic that makes the next version.

In: flat arrays of values, optimizer state and gradients. Out: the next version's bytes, in a buffer that no reader
holds. The same arithmetic in the same order gives the same bits on every server.

Read `versions` first: a few buffers of equal size for each partition, so that reads need no copy. `shm_regions` puts
them where workers on the same machine can read them. `optimizers` lists the state of each optimizer, and computes a
loop's scalars from settings. `kernels` are the compiled loops, and `pieces` is how they reach memory.
"""
