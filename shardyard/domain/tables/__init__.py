"""What all roles must agree on about embedding tables.

In: settings, seeds and ids. Out: the partition of an id, the first values of its row, whether it gets a row at all.
All of it is a function of its arguments, with the same bits on every machine and in every release.

Read `table_settings` first: what a table is told. `row_ids` says which partition has a row, `row_routing` does so for
a batch. `initial_values` names how rows begin, `row_values` makes them. `row_admission` says which ids get a row.
`row_optimizers` lists the optimizers of rows. `splitmix` and `splitmix_loops` are the random numbers beneath all
that.
"""
