"""The server towards the outside: the gRPC service, and the process.

In: messages, checked and turned into domain values. Out: replies, with payloads put together for the stream or for
shared memory. Nothing is stored or decided here; `hosting` does that.

Read `servicer` first: one method for each RPC. `exchange_stream` serves a worker's stream, push and pull in one:
`payload_reader` puts the bytes of a push together, `stream_memory` is what it shares with a worker on this host.
`pull_order` says in which order the bytes of values go out, `pull_encoder` in which codec. `process` registers the
server with the coordinator and ends it.
"""
