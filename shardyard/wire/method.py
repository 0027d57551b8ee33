"""A method of a service, and how its requests and answers become bytes and back.

`make protos` generates shardyard.wire.methods, which lists all methods. Must not know: channels, servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from shardyard.wire import frames
from shardyard.wire.common_messages import Generated, parsed

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True)
class Wire(Generic[Request]):
    """How one kind of message becomes bytes and back. `decode` raises MalformedPayload or TooLarge."""

    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Request]


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """A method of a service. `streams_in`: the request is a stream. `streams_out`: the answer is a stream."""

    service: str
    name: str
    request: Wire[Request]
    response: Wire[Response]
    streams_in: bool = False
    streams_out: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def __hash__(self) -> int:
        return hash(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and other.path == self.path


def message(kind: type[Generated]) -> Wire[Generated]:
    def decode(data: bytes) -> Generated:
        return parsed(kind, data, f"a {kind.DESCRIPTOR.name} of {len(data)} bytes")

    return Wire(kind.SerializeToString, decode)


FRAME: Final[Wire[frames.Frame]] = Wire(frames.encode, frames.decode)
"""A header and a payload. The payload is not copied into a protobuf message."""
