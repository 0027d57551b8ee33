"""What every role stands on: the types of a yard, its errors and its limits. No I/O, no torch.

In: nothing; this is the ground floor. Out: frozen values and pure functions that all roles agree on. From top to
bottom:

- `layout`: how variables and tables are cut into partitions, and the check of that.
- `tables`: what a table is told, and where its rows belong.
- `compression`, `optimizers`, `pushes`: settings of codecs and optimizers; a push and its reply.
- `pulls`, `push_names`, `consistency`, `variables`: a read, the names of pushes and leases, modes, element types.
- `ids`, `orders`, `units`: identifiers; the order of samples, and their cut into steps. `failpoints`: crashes for
  tests.
- `errors`, `limits`, `compiling`: the tree of errors, the bounds, the options of compiled loops.

Read `ids`, `push_names` and `errors` first.
"""
