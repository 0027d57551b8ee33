"""One push and pull: from tensors to one message for each server, and back.

In: gradients, rows and the name of a push, from `training`. Out: the values of one version, and the servers' verdicts.
A push names all partitions of each server. A push that is sent again has the same name, so a server counts it once.

Read in the order of a step: `requests` (what training asks), `server_group` (all servers under one map),
`request_builder` (the part of one server), `fan_out` (calls and retries), `server_stream` (the stream to one server).
`buffers` below them holds gradients and values. `row_reads` looks table rows up, `overlap` sends gradients during
backward, `norm_sums` sums the norm of a synchronous step.
"""
