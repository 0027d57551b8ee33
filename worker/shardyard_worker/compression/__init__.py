"""How gradients become smaller, and where the part that was not sent is kept.

In: the flat gradient of a block. Out: a code, in the form that shardyard.codecs defines. What a code leaves out (the
residual) stays in this worker, is added to the next gradient, and goes into checkpoints.

Read `error_feedback` first: a whole push, how it is undone, saved and restored. `block_state` has the residual,
momentum and factor of one block, and encodes it, on a GPU with `device_codecs`. `push_boundary` finds the moment
between two pushes at which that state may be copied. `residual_state` saves it in checkpoints and restores it.
"""
