"""Optimizers: their settings move to the servers, which apply the updates.

In: an optimizer of torch, or one of `extra`. Out: an `OptimizerSpec` for the servers, and an optimizer whose `step`
pushes and pulls. An option that the servers cannot apply exactly as torch does is refused.

Read `server_optimizer` first: the translation, option by option. `lr_schedule` makes learning rates a function of the
job's step. `grad_scaler` keeps one loss scale for all workers. `extra` has optimizers that torch lacks (LAMB, Lion,
FTRL), as `shardyard.optim`.
"""
