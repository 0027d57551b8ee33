"""Files that are encrypted where they lie: what is found when they change, and which key is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.config import configuration
from shardyard.domain.errors import CheckpointDamaged, ConfigurationError
from shardyard.storage.access import StorageAccess
from shardyard.storage.encryption import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    EncryptedStorage,
    StorageKeys,
    encrypted,
    keys_in,
)
from shardyard.storage.storage import LocalStorage
from tests.support.checkpoint_libraries import JOB, write_whole

FORMER, NEW = "0a" * 32, "5f" * 32
LENGTH = SEGMENT_BYTES + TAG_BYTES
WHOLE = os.urandom(3 * SEGMENT_BYTES + 17)


def storage_with(tmp_path: Path, *keys: str) -> EncryptedStorage:
    path = tmp_path / "keys"
    path.write_text("\n".join(keys) + "\n")
    return EncryptedStorage(LocalStorage(tmp_path / "files"), StorageKeys(path))


@pytest.mark.parametrize("nbytes", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES])
def test_every_length_and_range_is_read_as_it_was_written(tmp_path: Path, nbytes: int) -> None:
    storage, plain = storage_with(tmp_path, NEW), WHOLE[:nbytes]
    assert storage.write("f", [plain[:7], plain[7:]]).nbytes == storage.size("f") == nbytes
    assert storage.list_files("") == {"f": nbytes}
    for begin in {0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, nbytes - 1, nbytes}:
        for end in {0, 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, nbytes}:
            if 0 <= begin <= end <= nbytes:
                assert storage.read("f", begin, end - begin) == plain[begin:end]
    with pytest.raises(CheckpointDamaged, match="ends at byte"):
        storage.read("f", 0, nbytes + 1)


def test_nothing_of_the_plain_text_lies_on_the_storage(tmp_path: Path) -> None:
    storage = storage_with(tmp_path, NEW)
    storage.write("f", [b"the same secret " * 8])
    storage.write("g", [b"the same secret " * 8])
    first, second = ((tmp_path / "files" / name).read_bytes() for name in ("f", "g"))
    assert b"secret" not in first
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]


@pytest.mark.parametrize(
    "change", ["a byte", "the salt", "segments swapped", "the end dropped", "cut within", "longer"]
)
def test_changed_file_is_refused(tmp_path: Path, change: str) -> None:
    storage, path = storage_with(tmp_path, NEW), tmp_path / "files" / "f"
    storage.write("f", [WHOLE])
    found = path.read_bytes()
    one, two, three = HEADER_BYTES, HEADER_BYTES + LENGTH, HEADER_BYTES + 2 * LENGTH
    flipped = bytearray(found)
    flipped[HEADER_BYTES - 1 if change == "the salt" else two + 5] ^= 1
    path.write_bytes(
        {
            "a byte": bytes(flipped),
            "the salt": bytes(flipped),
            "segments swapped": found[:one] + found[two:three] + found[one:two] + found[three:],
            "the end dropped": found[: HEADER_BYTES + 3 * LENGTH],
            "cut within": found[:-5],
            "longer": found + bytes(40),
        }[change]
    )
    with pytest.raises(CheckpointDamaged, match="has changed in segment"):
        storage.read("f", 0, storage.size("f"))


def test_missing_key_is_named_by_its_id(tmp_path: Path) -> None:
    written = CheckpointLibrary(storage_with(tmp_path, FORMER))
    write_whole(written, 1)
    with pytest.raises(
        ConfigurationError, match=r"is encrypted with the key of id [0-9a-f]{16}; .*keys has [0-9a-f]{16}"
    ):
        CheckpointLibrary(storage_with(tmp_path, NEW)).load(JOB)
    with pytest.raises(ConfigurationError, match=r"storage\.key_file is not set"):
        CheckpointLibrary(LocalStorage(tmp_path / "files")).load(JOB)
    both = CheckpointLibrary(storage_with(tmp_path, NEW, FORMER))
    assert both.verify(JOB) == ()
    write_whole(both, 2)
    newer = CheckpointLibrary(storage_with(tmp_path, NEW))
    assert newer.verify(JOB, 2) == ()


def test_file_that_is_not_encrypted_is_refused_where_a_key_is_set(tmp_path: Path) -> None:
    write_whole(CheckpointLibrary(LocalStorage(tmp_path / "files")), 1)
    with pytest.raises(CheckpointDamaged, match="is not encrypted"):
        CheckpointLibrary(storage_with(tmp_path, NEW)).load(JOB)


@pytest.mark.parametrize("text", ["", "5f" * 31, "zz" * 32, ("5f" * 32 + "\n") * 17])
def test_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigurationError, match="is no list of keys"):
        StorageAccess(key_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        StorageAccess(key_file=str(tmp_path / "none"))


def test_example_names_a_key_file_and_without_one_nothing_is_encrypted(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[4] / "configs/encryption.yaml"
    assert configuration.load(example, {}, {}).settings.storage.key_file == "/run/secrets/shardyard-storage-key"
    storage = LocalStorage(tmp_path)
    assert encrypted(storage, keys_in("")) is storage
