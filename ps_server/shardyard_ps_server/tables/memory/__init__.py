"""Where the bytes of a table lie. This room knows no ids and no rules.

In: sizes and bounds. Out: arrays, rows and slots, locks, and each table's share of the server's memory.

Read `layout` first: words, fields and arrays. `intrinsics` adds locks and counters to the compiler's language.
`address_space` reserves memory that grows without a copy, `heap` allocates rows in it. `budget` divides the server's
memory between tables. `epoch_reclaim` frees memory once no look-up can still read it. `shared_exclusive` lets one
thread change a table alone.
"""
