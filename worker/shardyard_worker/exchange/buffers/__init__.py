"""The memory of one push and pull: gradients in their layout on the wire, and the values that come back.

Decided here: where each block of a variable lies in a server's payload, which memory holds it (shared with servers on
this machine, or not), and how tensors are copied into it and out of it, also from and to a GPU.
In: gradients and targets of the model, a partition map, bytes that arrive. Out: payloads for a push, filled targets.
Nothing here calls a server or knows what a push is called.

Read `tensor_types` (which tensors fit), `buffer_layout` (where blocks lie), `flat_buffers` (gradients),
`pulled_values` (values), `partial_reply` (values that are still arriving). `tensor_copy` copies in this process's
memory, `device_copies` to and from a GPU. `shm_rows` is one stream's shared memory for table rows.
"""
