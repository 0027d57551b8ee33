"""The bytes of the protocol, held against the committed golden vectors (tests/golden/make.py)."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.message import Message

from shardyard.domain.ids import PartitionId
from shardyard.wire import frames, layout_messages, push_messages
from shardyard.wire.headers import HeaderReader, HeaderWriter, reply_from_header, reply_to_header
from shardyard.wire.v1 import agent_pb2, coordinator_pb2, parameter_server_pb2

GOLDEN = Path(__file__).parents[3] / "golden"


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MESSAGES: dict[str, Message] = load_maker().messages()
VECTORS: dict[str, bytes] = {
    name: bytes.fromhex(text) for name, text in json.loads((GOLDEN / "vectors.json").read_text()).items()
}


def test_every_example_has_a_vector_and_every_vector_an_example() -> None:
    assert sorted(MESSAGES) == sorted(VECTORS)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_message_is_the_golden_bytes_both_ways(name: str) -> None:
    message = MESSAGES[name]
    assert message.DESCRIPTOR.name == name.partition(".")[0]
    assert message.SerializeToString(deterministic=True).hex() == VECTORS[name].hex()
    assert type(message).FromString(VECTORS[name]) == message


@pytest.mark.parametrize("name", [name for name in sorted(VECTORS) if "Frame." in name])
def test_own_codec_reads_and_writes_the_golden_frames(name: str) -> None:
    frame = frames.decode(VECTORS[name])
    message = MESSAGES[name]
    assert frame.offset == message.offset
    assert bytes(frame.data) == message.data
    assert frame.header == (message.header.SerializeToString() if message.HasField("header") else b"")
    assert frames.encode(frame) == VECTORS[name]


@pytest.mark.parametrize("name", [name for name in sorted(VECTORS) if name.startswith("PushHeader.")])
def test_golden_push_headers_pass_the_door_and_come_back(name: str) -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    if MESSAGES[name].HasField("step"):
        plan, _ = reader.read(VECTORS["PushHeader.plan"])
        assert writer.write(plan) == VECTORS["PushHeader.plan"]
        order, named = reader.read(VECTORS[name])
        assert named is plan
        assert writer.write(order) == VECTORS[name]
        return
    order, plan_named = reader.read(VECTORS[name])
    assert plan_named is None
    message = push_messages.push_to_wire(order)
    message.plan = MESSAGES[name].plan
    assert message.SerializeToString(deterministic=True) == VECTORS[name]


@pytest.mark.parametrize("name", [name for name in sorted(VECTORS) if name.startswith("PullHeader.")])
def test_golden_pull_headers_come_back(name: str) -> None:
    pulled = (PartitionId(0),) if name == "PullHeader.parts" else (PartitionId(0), PartitionId(2))
    if "attached" in name:
        pulled = ()
    pushed = (PartitionId(0), PartitionId(2)) if MESSAGES[name].HasField("push") else ()
    if MESSAGES[name].words:
        pushed = pulled
    answer = reply_from_header(VECTORS[name], pulled, pushed, shared=bool(MESSAGES[name].places))
    assert tuple(part.partition for part in answer.parts) == (() if answer.missing else pulled)
    assert tuple(part.partition for part in answer.push) == pushed
    plan = HeaderReader().read(VECTORS["PushHeader.plan"])[0] if MESSAGES[name].words else None
    assert reply_to_header(answer, plan) == VECTORS[name]


def test_golden_layout_and_map_pass_the_door_and_come_back() -> None:
    layout = layout_messages.layout_from_wire(MESSAGES["JobLayout"])
    assert layout_messages.layout_to_wire(layout).SerializeToString(deterministic=True) == VECTORS["JobLayout"]
    map_ = layout_messages.map_from_wire(MESSAGES["PartitionMap"])
    assert layout_messages.map_to_wire(map_).SerializeToString(deterministic=True) == VECTORS["PartitionMap"]


def test_worked_example_of_the_protocol_is_a_golden_vector() -> None:
    text = (GOLDEN.parents[1] / "docs" / "reference" / "protocol.md").read_text()
    shown = re.findall(r"^ {4}((?:[0-9a-f]{2} ?)+)(?: |$)", text, re.MULTILINE)
    assert bytes.fromhex("".join(shown)) == VECTORS["PushFrame.first"]


def test_every_method_is_on_the_protocols_page_under_its_service() -> None:
    text = (GOLDEN.parents[1] / "docs" / "reference" / "protocol.md").read_text()
    table = text[text.index("## Methods") : text.index("## Identity")]
    listed: dict[str, list[str]] = {}
    service = ""
    for line in table.splitlines()[4:]:
        if line.startswith("|"):
            first, methods = [cell.strip() for cell in line.split("|")[1:3]]
            service = first or service
            listed.setdefault(service, []).extend(methods.split(", "))
    files = (agent_pb2, coordinator_pb2, parameter_server_pb2)
    served = {
        name: sorted(method.name for method in found.methods)
        for file in files
        for name, found in file.DESCRIPTOR.services_by_name.items()
    }
    assert {name: sorted(methods) for name, methods in listed.items()} == served
