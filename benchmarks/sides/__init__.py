"""The programs that are measured, each a process of its own, started with `python -m sides.ROOM.NAME`."""
