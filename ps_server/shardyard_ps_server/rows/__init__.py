"""The tables of one partition, and the rows as they were at earlier versions.

In: rows of a push, decoded and checked before anything changes; look-ups by version. Out: changed tables, and the
rows of the version that was asked for. Tables change in place, so what a reader still needs is set aside first.

Read `partition_tables` first. `table_states` makes the tables and cuts them together, `row_sums` takes the mean of a
synchronous step's gradients. `previous_rows` are the rows before the last step. `pinned_rows` are those of a version
that one reader holds, `pin_rows` says what a push sets aside for all readers. `lookups_in_flight` protects rows that
a worker has read and not pushed yet from expiry.
"""
