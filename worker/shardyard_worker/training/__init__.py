"""A model's variables and tables in a job: registered, initialised, pushed and pulled.

In: gradients that autograd computes. Out: a push for `exchange`, then the new values in the model's own tensors.
Which version they must be is decided by `consistency`.

Read `variables` first (the values that all share), then `trainer` (registration, first values, the newest map),
`pushes` (gradients into a push) and `loading` (a version into the model). `grad_hooks` makes `.grad` a view of what is
pushed. `clipping` and `nonfinite` look at gradients before a push. `forward_prefetch` lets a forward begin before all
values are there. `table_binding` connects the tables of the model with those of the job, `remote_rows` looks their rows
up.
"""
