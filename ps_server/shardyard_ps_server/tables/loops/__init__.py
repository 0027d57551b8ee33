"""The compiled loops of tables. They run without the interpreter's lock, in several threads at once.

In: arrays that `memory` lays out, and batches of ids. Out: rows, and counts or negative numbers in place of
exceptions.

Read `index` first: from ids to buckets, in stripes with a lock each. `push_loops` looks up, pushes and removes
batches of ids; the arithmetic of optimizers is in shardyard.domain.tables.row_rules. `walks` goes through a whole
table, for cuts and expiry. `moves` moves rows between memory and the file.
"""
