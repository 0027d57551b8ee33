"""How gradients become smaller, and where the part that was not sent is kept.

In: the flat gradient of a block. Out: a code, in the form that shardyard.codecs defines. What a code leaves out (the
residual) stays in this worker, is added to the next gradient, and goes into checkpoints.

Read `error_feedback` first: residuals, momenta and factors of each block, on the CPU. `device_feedback` keeps the
same state on a GPU and codes there with `device_codecs`. `push_boundary` finds the moment between two pushes at which
that state may be copied. `residual_state` writes it into checkpoints and takes it up again.
"""
