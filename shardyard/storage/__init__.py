"""Files below a URL, on this machine or in an object store. A file is there whole, or not at all.

In: a URL and bytes, or named arrays. Out: the same bytes or arrays; every number is checked when it is read.
shardyard.checkpoints decides what the files mean.

Read `storage` first: write, read, list and delete. `tensors` is the form of a safetensors file. `json_reader`
reads and writes JSON, and names the place of an error in it.
"""
