"""The coordinator's RPCs: one row each, with the conversion of its request and of its reply.

In: a request's message. Out: the reply's message, or a ShardyardError. What is decided comes from the machine, through
`Backend.ask`; nothing here keeps state.

- `rpc`: what a row is, and how a request is put to the machine. Read it first.
- `members`, `jobs`, `data`, `checkpoints`, `inspection`: the rows by subject, each with its conversions above it.
- `parts`: parts of messages that several RPCs share.
- `table`: all rows, made into the gRPC service.
"""
