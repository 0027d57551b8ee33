"""Callers that do harm: attacks (what each does, at a bounded rate), http2 (the bytes that it sends, without gRPC's
client, which sends valid ones only)."""
