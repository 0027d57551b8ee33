"""The compiled loops of tables. They run without the interpreter's lock, and several threads run them at once.

In: arrays that `memory` lays out, and batches of ids. Out: rows, and counts or negative numbers in place of
exceptions.

Read `index` first: from ids to buckets, in stripes with a lock each. `push_loops` looks up, pushes and removes
batches. `row_rules` is the arithmetic of optimizers on rows. `walks` goes through a whole table, for cuts and expiry.
`moves` carries rows between memory and the file.
"""
