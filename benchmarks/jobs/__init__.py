"""Whole jobs on a local yard: run one with `make bench BENCH=NAME`.

consistency (the claims of `claims/`), accuracy, reliability (faults, checkpoints, logs), evaluator and serving (readers
beside a job that trains).
"""
