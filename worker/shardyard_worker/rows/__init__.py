"""Ids and rows of tables between a model and the servers. This room knows no servers and no modules.

In: the ids of a batch, and a gradient for each occurrence. Out: each id once, in the order of partitions, with its
gradients summed and coded; and the rows that need not be read again.

Read `dedup` first, then `row_codec` (the form in which rows travel). `row_prefetch` holds the rows of the next
batches, which arrive with an exchange. `row_cache` keeps rows for a bounded number of steps, `frequency_cache` those
asked for most often, and `cache_rules` says when a job's settings allow that. `id_columns` has a record for each id,
in arrays that grow.
"""
