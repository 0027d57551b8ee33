"""What embedding tables cost: run one with `make bench BENCH=NAME`.

`tables` measures `claims/table_*.py`; table_ids, cached_rows and table_checkpoints measure one mechanism each.
"""
