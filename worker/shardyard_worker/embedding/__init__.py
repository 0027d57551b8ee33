"""Embedding tables in a model: modules that look up rows by id, with or without a yard.

In: ids in a forward, gradients in a backward. Out: rows or pooled bags, and for each table the ids whose rows have a
gradient. In a job the rows are on servers (`training` has them); alone they are in this process.

Read `modules` first (`sy.Embedding` and the other modules), then `table`, which they share, and `pooling`, the
arithmetic. Settings: `config` (which ids get a row and lose it) and `row_optimizers` (how rows are updated). Without a
yard: `local_rows` and `local_optimizer`. `table_io` reads and writes files of rows. `api` is what users import as
`shardyard.tables`.
"""
