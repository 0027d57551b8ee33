"""The list of methods, held against the services of the protos."""

from __future__ import annotations

import importlib

import pytest
from google.protobuf.descriptor import MethodDescriptor

from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.wire import frames, methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import agent_pb2, coordinator_pb2, parameter_server_pb2

FILES = (agent_pb2, coordinator_pb2, parameter_server_pb2)
FRAMES = {"PushFrame", "PullFrame", "LookUpFrame", "RowsFrame", "OptimizerFrame"}


def declared() -> dict[str, MethodDescriptor]:
    return {
        f"/{service.full_name}/{method.name}": method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def listed() -> dict[str, Method]:  # type: ignore[type-arg]
    found = [value for value in vars(methods).values() if isinstance(value, Method)]
    assert len({method.path for method in found}) == len(found)
    return {method.path: method for method in found}


def test_listed_methods_are_those_of_the_protos() -> None:
    assert sorted(listed()) == sorted(declared())
    assert {path.split("/")[1] for path in declared()} == {
        f"{methods.PACKAGE}.{name}" for name in ("Agent", "Coordinator", "ParameterServer")
    }


@pytest.mark.parametrize("path", sorted(declared()))
def test_method_streams_as_declared(path: str) -> None:
    method, descriptor = listed()[path], declared()[path]
    assert (method.streams_in, method.streams_out) == (descriptor.client_streaming, descriptor.server_streaming)


@pytest.mark.parametrize("path", sorted(declared()))
def test_method_carries_the_declared_messages(path: str) -> None:
    method, descriptor = listed()[path], declared()[path]
    for wire, declared_type in ((method.request, descriptor.input_type), (method.response, descriptor.output_type)):
        generated = getattr(importlib.import_module(_module_of(declared_type.file.name)), declared_type.name)
        if declared_type.name in FRAMES:
            frame = wire.decode(generated(offset=3, data=b"abc").SerializeToString())
            assert isinstance(frame, frames.Frame)
            assert generated.FromString(wire.encode(frame)) == generated(offset=3, data=b"abc")
        else:
            message = wire.decode(b"")
            assert type(message) is generated
            assert wire.encode(message) == b""


@pytest.mark.parametrize("path", sorted(declared()))
def test_bytes_that_are_no_message_are_malformed(path: str) -> None:
    method = listed()[path]
    for wire in (method.request, method.response):
        with pytest.raises((MalformedPayload, TooLarge)):
            wire.decode(b"\x0a\xff\xff\xff\xff\x0f")


def _module_of(proto: str) -> str:
    return proto.removesuffix(".proto").replace("/", ".") + "_pb2"
