"""Checkpoints: what is written, where it is, and how a whole one is found again.

docs/reference/checkpoint-files.md has the format.

In: partitions, tables and residuals, as arrays. Out: files below a URL, and a manifest that is written last. Nothing
is given out of a file whose digest was not checked.

Read `manifest` first: which files make a checkpoint. `library` lists, reads, commits and prunes all checkpoints of a
URL. Files: `partition_file` (dense blocks and the ledger), `rows_file` and `table_state` (tables), `residual_file` (a
worker's error feedback). JSON: `layout`, `tables`. `convert` has the messages. `best` is what an evaluator keeps;
`row_exports` writes rows for other programs.
"""
