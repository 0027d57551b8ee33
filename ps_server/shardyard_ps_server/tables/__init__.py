"""Tables of rows by id: how a server keeps those of one partition (docs/internals/tables.md).

In: ids, rows, gradients and settings (`shardyard.domain.tables.table_settings`). Out: rows. Must not know: torch,
jobs, the wire, partitions. From top to bottom:

- `table`: the way in. It checks what is asked and calls the rest. Read it first.
- `cut_chain`: what is known of changes since the last cut. `row_quota`: how many rows may still come. `new_memory`: the
  memory of a new table. `checks`: of arrays that are given.
- `disk_tier`: which rows are in memory and which in the file. `cuts`: a table copied at one moment. `expiry`: what
  goes.
- `stripes`: the index's memory, and when it grows. `bloom_filter`: how often ids came. `cold_file`: the file of rows.
  `batches`: memory for batches of ids.
- `loops`: the compiled loops over all of that.
- `memory`: layout, address space, locks and budget.
"""
