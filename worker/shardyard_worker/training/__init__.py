"""A model's variables and tables in a job: registered, initialised, pushed and pulled.

In: gradients that autograd computes. Out: a push for `exchange`, then the new values in the model's own tensors.
`consistency` decides which version they must be.

Read `variables` first (the values that all share), then `trainer` (registration, initial values, the newest map),
`pushes` (gradients into a push) and `loading` (a version into the model). `grad_hooks` makes `.grad` a view of the
memory that is pushed. `clipping` and `nonfinite` check gradients before a push. `forward_prefetch` lets a forward begin
before all values are there. `table_binding` connects the model's tables to the job's, `remote_rows` looks up their
rows.
"""
