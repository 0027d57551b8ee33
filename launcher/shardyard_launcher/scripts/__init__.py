"""A training script in a yard: launched through an agent, shown, and waited for.

In: a command, a number of workers, an agent. Out: the script's output with a line of progress, and its exit code.

Read `script` first: the launch, its events, the stop, and the new launch if the agent died. `progress` shows output
and progress, on a terminal or in a file.
"""
