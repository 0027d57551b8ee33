"""What all roles must agree on about embedding tables.

In: settings, seeds and ids. Out: the partition of an id, whether it gets a row, the first values of the row, its values
after an update, and whether it expires. All of it is a function of its arguments, with the same bits on every machine
and in every release.

Read `table_settings` first. `row_ids` says which partition has a row, `row_routing` does so for a batch.
`initial_values` names how rows begin, `row_values` computes them. `row_admission` says which ids get a row,
`row_expiry` which expire. `row_optimizers` lists the optimizers of rows, `row_rules` has their arithmetic (with
`prefetch`). `splitmix` and `splitmix_loops` are the random numbers that all of this uses.
"""
