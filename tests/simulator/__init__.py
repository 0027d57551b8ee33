"""A whole yard in one thread: the shipped coordinator, servers and workers under a clock, a network and a disk that a
seed decides. See docs/internals/reliability.md, "Simulator"."""
