"""What every role stands on: types, errors, limits. No I/O, no torch, no numpy beyond dtypes."""
