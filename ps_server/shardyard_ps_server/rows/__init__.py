"""The tables of one partition, and their rows as they were at earlier versions.

In: rows of a push, decoded and checked before anything changes; look-ups by version. Out: changed tables, and the rows
of the version that was asked for. Tables change in place, so what a reader still needs is copied before.

Reading order: `pushed_rows` decodes and checks rows. `partition_tables` applies them, and decides which rows expire;
`table_states` makes the tables and cuts them together; `row_sums` is the mean of a synchronous step's gradients.
`row_overlay` keeps what earlier versions had. `lookups_in_flight` keeps rows that a worker has read, and not pushed
yet, from expiry.
"""
