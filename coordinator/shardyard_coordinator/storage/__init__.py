"""What a job has on the storage, and how it goes back to it. These are only the books: nothing here reads or writes a
file.

In: checkpoints that were taken, servers that died, restores that were ordered. Out: when the next checkpoint is due,
which partitions are lost and which server gets them, and from which checkpoint and logs they are restored.

Read `checkpoint_book` first: the number of the next checkpoint and the newest committed one. Then `recovery` (lost
partitions), `log_owners` (whose logs continue a checkpoint), `restore_point` (the checkpoint of an ordered restore) and
`checkpoint_residuals` (which worker takes over which residual of a checkpoint).
"""
