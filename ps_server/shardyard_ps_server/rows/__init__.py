"""The tables of one partition, and their rows as they were at earlier versions.

In: rows of a push, decoded and checked before anything changes; look-ups by version. Out: changed tables, and the rows
of the requested version. Tables change in place, so values that a reader still needs are copied before.

Reading order: `pushed_rows` decodes and checks rows. `partition_tables` applies them, and decides which rows expire;
`table_states` makes the tables and cuts them together; `row_sums` is the mean of a synchronous step's gradients.
`row_overlay` keeps the values of earlier versions. `lookups_in_flight` protects rows that a worker has read, but not
pushed yet, from expiry.
"""
