"""Partitions into the files of a checkpoint, and from a checkpoint to what partitions begin with.

In: partitions and tables, cut at one moment while pushes go on. Out: safetensors files, in the form of
shardyard.checkpoints. The coordinator decides when a checkpoint is due and writes its manifest.

Read `saver` first: cut, copy, write, let go. `table_saver` writes a table whole, or only what changed since its last
cut. `restore` changes a partition's state as it was saved into what a new job, or a job in another mode, begins with.
"""
