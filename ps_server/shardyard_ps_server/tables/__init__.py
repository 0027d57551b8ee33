"""Tables of rows by id: how a server keeps those of one partition (docs/tables.md).

`Table` is the way in; `TableSettings` says what it is told. Must not know: torch, jobs, the wire, partitions.
"""
