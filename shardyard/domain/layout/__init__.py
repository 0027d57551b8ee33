"""How a job's variables and tables are cut into partitions.

In: variables, blocks and tables, from a message, a manifest or a journal. Out: a `JobLayout` that is known to be
complete, or an error. shardyard_coordinator.placement plans layouts.

Read `layouts` (the types), then `checks` (the rules: each element in exactly one block, blocks one behind the other).
"""
