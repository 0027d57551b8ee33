"""The types of a yard, its errors and its limits, which every role uses. No I/O, no torch.

This folder imports no other folder. It has frozen values and pure functions on which all roles agree. From top to
bottom:

- `layout`: how variables and tables are cut into partitions, and the check of a layout.
- `tables`: the settings of a table, and the partition of each row.
- `compression`, `optimizers`, `pushes`: settings of codecs and optimizers; a push and its reply.
- `pulls`, `push_names`, `consistency`, `variables`: reads; names of pushes, and leases; modes; element types.
- `ids`, `epochs`: identifiers; the order of an epoch's samples, and how it is cut into steps.
- `errors`, `limits`, `compiling`: the tree of errors, the limits, the options of compiled loops.

Read `ids`, `push_names` and `errors` first.
"""
