"""One file for each command: its options, what it asks for, and what it prints.

In: options and settings. Out: text or JSON on standard output, and an exit code. JSON is a promise to scripts: names
stay, new ones may come. `cli` lists the commands.

- A yard on this machine: `up_run`, `down`; `supervisor`, which `up` leaves behind. Read these first.
- Scripts that agents run: `launches`.
- One role in the foreground: `roles`. A script that evaluates: `evaluate`.
- Look: `audit`, `quarantine`, `doctor`; `shardyard status` has a folder of its own, `status`.
- Change: `set`, `stop`, `checkpoint`.
"""
