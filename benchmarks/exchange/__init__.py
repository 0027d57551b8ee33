"""What one exchange between workers and servers costs: run one with `make bench BENCH=NAME`.

latency (4 KiB), push_pull (64 MiB), training and scaling (whole steps), prefetch and compression (over slow links).
"""
