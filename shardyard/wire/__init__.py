"""What travels: messages, payload frames, and their conversion to domain values.

In: a peer's bytes, never trusted. Out: well-formed domain values, or MalformedPayload, TooLarge or InvalidRequest.
`v1` is generated from protos/ (docs/reference/protocol.md).

Read `methods` first: every RPC as a typed value. Conversions, each both ways: `common_messages` (ids, names, modes),
`layout_messages`, `push_messages`, `pull_messages`, `lease_messages`, `table_messages`. `frames` are payloads without
a copy. `headers` is the short form of headers that repeat on one stream.
"""
