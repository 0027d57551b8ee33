"""The gRPC service of a server, and the server's process.

In: messages, checked and turned into domain values. Out: replies, with payloads put together for the stream or for
shared memory. Nothing is stored or decided here; `hosting` does that.

Read `servicer` first: one method for each RPC. `exchange_stream` serves a worker's stream, where each exchange is a
push and a pull: `payload_reader` puts the bytes of a push together, `stream_memory` is the memory shared with a worker
on the same host. `pull_order` decides the order in which the bytes of values are sent, `pull_encoder` their codec.
`process` registers the server with the coordinator and ends it.
"""
