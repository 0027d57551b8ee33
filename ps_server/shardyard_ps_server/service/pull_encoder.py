"""Encodes the values that one worker pulls over one stream.

Owns: which block travels in which codec, and, for "delta", a shadow of what the worker has. Invariant: every code goes
to the worker, in order, or the stream ends and this encoder with it; so worker and shadow never differ. Must not know:
versions.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardyard.codecs.pulls import DeltaSender, encode_values
from shardyard.domain.compression import NONE, CodecSpec, parse_pull_rules
from shardyard.domain.errors import ConfigurationError, InvalidRequest
from shardyard.domain.layout.layouts import JobLayout
from shardyard_ps_server.hosting.hosted_job import HeldValues


class PullEncoder:
    """`coding`: as shardyard.domain.compression.Rules write it. Raises InvalidRequest for any other text."""

    def __init__(self, coding: str, layout: JobLayout) -> None:
        try:
            rules = parse_pull_rules(coding)
        except ConfigurationError as error:
            raise InvalidRequest(f"the coding of a pull: {error.what}") from error
        self._layout = layout
        self._codecs: tuple[CodecSpec, ...] = tuple(rules.codec_for(variable) for variable in layout.variables)
        self._senders: dict[CodecSpec, DeltaSender] = {}

    def codes(self, held: HeldValues) -> Iterator[memoryview]:
        """Yields one code for each block of each partition, in order."""
        for partition, buffer in held.buffers:
            for number, block in enumerate(self._layout.partitions[partition.id].blocks):
                spec, codec = self._layout.variables[block.variable], self._codecs[block.variable]
                end = block.position + block.length * spec.dtype.item_bytes
                values = buffer[block.position : end].view(spec.dtype.value)
                if codec.kind == "delta":
                    yield self._sender(codec).code((partition.id, number), values)
                else:
                    yield encode_values(codec if spec.dtype.is_floating else NONE, values)

    def _sender(self, codec: CodecSpec) -> DeltaSender:
        if codec not in self._senders:
            self._senders[codec] = DeltaSender(codec)
        return self._senders[codec]
