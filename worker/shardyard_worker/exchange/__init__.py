"""One push and pull: from tensors to one message for each server, and back.

In: gradients, rows and the name of a push, from `training`. Out: the values of one version, and the servers'
verdicts. A push names all partitions of each server; what is sent again carries the same name, so a server counts it
once.

Read `server_group` first: it fans out, waits and retries. `server_stream` is the stream to one server, `shm_rows` the
shared memory for rows on the same machine. `flat_buffers` lays tensors out as partitions lie on the wire,
`device_copies` fills them from a GPU. `overlap` sends gradients during backward, `partial_reply` gives values out
while they arrive. `norm_sums` adds up what partitions say about a synchronous step.
"""
