"""How much is trained while a worker's memory is measured."""

BATCH, STEPS, CHECKPOINT_STEPS = 16, 14, 6
