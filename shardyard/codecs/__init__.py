"""Compression of gradients and values: from the elements of a block to a code, and back. docs/reference/codes.md has
the form of codes.

In: a contiguous array of shape (n,), float32 or float64, or the ids and rows of tables. Out: bytes that describe
themselves, so that a receiver needs no settings. Uses only numpy and numba. What a worker keeps between pushes is in
shardyard_worker.compression. From top to bottom:

- `warmup`: compiles loops before they are needed. `pulls`: values from a server to one worker.
- `rows`: codes of ids and rows.
- `dense`: codes of blocks, one file for each family. Read `dense/encoding.py` and `dense/decoding.py` first.
- `format`: the form that all codes share.
"""
