"""Checkpoints: what is written, where it lies, how it is found whole again.

`storage` is bytes at a URL, `tensors` one safetensors file, `partition_file` a partition in such a file, `layout` and
`manifest` what says which files make a checkpoint, `library` all of a URL's checkpoints. docs/checkpoints.md has the
format.
"""
