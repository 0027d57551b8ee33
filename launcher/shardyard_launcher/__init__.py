"""The command `shardyard`: starts yards and scripts, and inspects and controls running ones.

Folders, from top to bottom. A folder imports only folders below it.

- `cli`: the list of commands, their exit codes, and how errors are shown. Read it first.
- `commands`: one file for each command.
- `status`: what `shardyard status` asks and shows.
- `yard`: the processes of a yard on this machine.
- `scripts`: a training script in a yard.
- `probes`: what `shardyard doctor` looks at.
- `terminal`: options that commands share, the connection to a coordinator, tables, and the form of an error.

A role (coordinator, server, agent) is imported only when it is started, so `shardyard --version` stays fast.
"""
