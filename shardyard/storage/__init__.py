"""Bytes at a URL: files that are there whole or not at all, on this machine or an object store.

In: a URL and bytes, or named arrays. Out: what was written, with every number checked when it is read. What the files
mean is decided by shardyard.checkpoints.

Read `storage` first: write, read, list and delete. `tensors` is the form of a safetensors file. `json_reader` takes
JSON apart and names the place of whatever is wrong in it.
"""
