"""Decoders of what people and other processes write: settings, files of a yard, errors of scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from shardyard.config.configuration import load, parse_job_settings
from shardyard.config.settings import JobSettings
from shardyard.domain.errors import InvalidRequest
from shardyard_launcher.yard.state_file import STATE_FILE, read_state
from shardyard_worker.agent.launch import read_error_file
from tests.fuzz.decoder import GOLDEN, Decoder, change_json


def settings(folder: Path) -> Iterator[Decoder]:
    job = JobSettings().model_dump_json().encode()
    yield Decoder(
        "a job's settings", (job,), lambda text: parse_job_settings(text.decode("utf-8", "replace")), change_json
    )
    config = folder / "config.yaml"

    def read_config(text: bytes) -> object:
        config.write_bytes(text)
        return load(config, {}, {})

    examples = tuple(path.read_bytes() for path in sorted((GOLDEN.parents[1] / "configs").glob("*.yaml")))
    yield Decoder("configuration file", examples, read_config)
    yard = {
        "format": 1,
        "processes": [
            {
                "name": "server-0",
                "role": "server",
                "pid": 1,
                "created_s": 1.5,
                "log": "/x",
                "address": "h:1",
                "ready": True,
            }
        ],
        "restarts": [
            {
                "name": "server-0",
                "pid": 1,
                "ending": "has ended",
                "died_s": 1.0,
                "number": 1,
                "restarts_max": 3,
                "window_ms": 5,
            }
        ],
        "given_up": {"server-0": "why"},
    }

    def read_yard(text: bytes) -> object:
        (folder / STATE_FILE).write_bytes(text)
        return read_state(folder)

    yield Decoder("yard.json", (json.dumps(yard).encode(),), read_yard, change_json)
    error = {"time": 1.5, "type": "ValueError", "message": "no", "traceback": "Traceback", "new_process_helps": False}

    def read_error(text: bytes) -> object:
        (folder / "error.json").write_bytes(text)
        found = read_error_file(folder / "error.json")
        if found is None:
            raise InvalidRequest("it is said in the log that nobody can read it")
        return found

    yield Decoder("a script's error file", (json.dumps(error).encode(),), read_error, change_json)
