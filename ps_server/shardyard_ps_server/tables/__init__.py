"""Tables of rows by id: how a server keeps those of one partition (docs/internals/tables.md).

In: ids, rows, gradients and settings (`shardyard.domain.tables.table_settings`). Out: rows. Must not know: torch,
jobs, the wire, partitions. From top to bottom:

- `table`: checks each call, and calls the rest. Read it first.
- `cuts`: a table copied at one moment. `expiry`: which entries expire. `disk_tier`: which rows are in memory, and which
  in the file.
- `state`: what all of these share. Then its parts: `stripes`, the index's memory, and when it grows; `bloom_filter`,
  estimates of how often ids came; `cold_file`, the file of rows; `new_memory`, the memory of a new table; `batches`,
  memory for batches of ids; `row_quota`, how many more rows fit; `checks` of arrays.
- `loops`: the compiled loops.
- `memory`: layout, address space, locks and budget.
"""
