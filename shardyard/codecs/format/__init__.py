"""The form of all codes, and functions that their loops share.

In: bytes from another process, which are never trusted. Out: a checked header and a bounded reader, or
MalformedPayload.

Read `form` first: ids of codecs, headers, bounds. `varints` reads numbers inside loops, `compiled` has random numbers
and passes in chunks, `finiteness` looks for NaN and infinity, `zstd` wraps a code in a zstd frame.
"""
