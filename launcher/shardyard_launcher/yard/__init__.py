"""A yard on this machine: its processes, from start to end.

In: settings and a state folder. Out: a running yard, or an error and no process left. Only processes that were
started here, or that the state file names, are ever ended.

Read `local_cluster` first: the order of start and stop, and the restarts. `role_process` is one process, known by its
pid and its time of creation. `state_file` writes down which processes there are; `running_yard` looks at a yard through
it. `temp_folder` is the folder of one `shardyard run`. `in_process` is a yard without processes, for a script that runs
alone.
"""
