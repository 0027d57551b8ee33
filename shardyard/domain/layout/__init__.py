"""How a job's variables and tables are cut into partitions.

In: variables, blocks and tables, from a message, a manifest or a journal. Out: a `JobLayout` that is known to be
whole, or an error. Layouts are planned by shardyard_coordinator.placement, not here.

Read `layouts` (the types), then `checks` (the rules: each element in exactly one block, blocks one behind the other).
"""
