"""Messages between processes, payload frames, and their conversion to domain values.

In: bytes from another process, which are never trusted. Out: domain values, or MalformedPayload, TooLarge or
InvalidRequest. A value that leaves this folder is well-formed: enums are known, counts and sizes are bounded, ids are
in range, numbers are finite. Sizes are checked before memory is allocated for them. `v1` is generated from protos/
(docs/reference/protocol.md).

Read `methods` first: every RPC as a typed value. Each of these converts in both directions: `common_messages` (ids,
names, modes), `layout_messages`, `push_messages`, `pull_messages`, `lease_messages`, `table_messages`. `frames` carry
payloads without copying them. `headers` writes headers that repeat on one stream in a short form.
"""
