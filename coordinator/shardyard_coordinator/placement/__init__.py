"""Where a job's variables and tables are: in which block, in which partition and on which server.

In: the variables and tables that a worker registers, and the living servers. Out: a layout (variables cut into blocks,
blocks into partitions) and an assignment of partitions to servers. A layout does not depend on the number of servers,
so the job's results do not either.

Read `placement` first: `plan` makes the layout, `assign` the map. `deployment` tracks how far the variables are on the
way to the servers. `registration` compares what workers register, `table_specs` checks tables. `layout_records` is
the form of a layout and a map in the journal.
"""
