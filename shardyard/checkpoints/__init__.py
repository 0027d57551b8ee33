"""Checkpoints: the content of their files, where these lie, and how a complete checkpoint is found.

docs/reference/checkpoint-files.md has the format.

In: partitions, tables and residuals, as arrays. Out: files below a URL, and a manifest that is written last. No value
is returned from a file before the digest of that file was checked.

Read `manifest` first: which files make a checkpoint. `library` lists, reads, checks, commits and prunes all
checkpoints of a URL. Files: `partition_file` (dense blocks and the ledger), `rows_file` and `table_state` (tables),
`residual_file` (a worker's error feedback). `layout` is the JSON of a job's layout. `convert` has the messages. `best`
is the best version that an evaluator found. `row_exports` writes rows for other programs.
"""
