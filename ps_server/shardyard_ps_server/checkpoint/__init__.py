"""Writes partitions into the files of a checkpoint, and adapts a checkpoint to the job that begins with it.

In: partitions and tables, cut at one moment while pushes go on. Out: safetensors files, in the form of
shardyard.checkpoints. The coordinator decides when a checkpoint is due and writes its manifest.

Reading order: `saver` cuts, copies, writes and releases. `table_saver` writes a table whole, or only what changed since
its last cut. `restore` turns a partition's saved state into what a new job, or a job in another mode, begins with.
"""
