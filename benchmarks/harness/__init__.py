"""What the benchmarks share: measuring (pairs, intervals, reports), machine (its use, links, delays), processes (the
measured programs) and workloads (models, data, checks of numbers)."""
