"""Storage: one contract for a folder, memory and S3 (moto, on loopback), and what a crash or a full disk leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.asyn
import numpy as np
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, PartitionEntry, PartitionFile
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigurationError,
    InvalidRequest,
    StorageUnavailable,
)
from shardyard.domain.ids import JobId, PartitionId, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard.runtime import failpoints
from shardyard.storage import storage as storages
from shardyard.storage.encryption import EncryptedStorage, StorageKeys
from shardyard.storage.storage import PIECE_BYTES, LocalStorage, Storage, Written, open_storage, write_file
from tests.support.checkpoints import load_partition, write_state

BUCKET = "checkpoints"
MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class ObjectStore:
    """An S3 of this machine."""

    endpoint: str
    files: s3fs.S3FileSystem


@pytest.fixture(scope="module", autouse=True)  # before the look at what a test leaves behind
def object_store() -> Iterator[ObjectStore]:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if "proxy" in name.lower() or name.startswith("AWS_"):
                patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with subprocess.Popen(
            [sys.executable, "-c", MOTO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        ) as server:
            assert server.stdout is not None
            endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            s3fs.S3FileSystem.clear_instance_cache()
            files = s3fs.S3FileSystem()
            files.mkdir(BUCKET)
            yield ObjectStore(endpoint, files)
            s3fs.S3FileSystem.close_session(files.loop, files.s3)
            s3fs.S3FileSystem.clear_instance_cache()
            # the thread in which fsspec waits for sockets
            loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=10)
            loop.close()
            fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None
            server.stdin.close()  # type: ignore[union-attr]
            assert server.wait(timeout=20) == 0


@pytest.fixture(params=["folder", "file url", "memory", "s3", "encrypted folder", "encrypted s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param.startswith("encrypted"):
        (tmp_path / "key").write_text("5f" * 32)
        inner = str(tmp_path / "deep") if "folder" in request.param else f"s3://{BUCKET}/{tmp_path.name}/secret"
        return EncryptedStorage(open_storage(inner), StorageKeys(tmp_path / "key"))
    if request.param == "s3":
        return open_storage(f"s3://{BUCKET}/{tmp_path.name}/deep")
    if request.param == "memory":
        return open_storage(f"memory://{tmp_path.name}")
    return open_storage(str(tmp_path / "deep") if request.param == "folder" else f"file://{tmp_path}/with%20space")


@pytest.mark.parametrize("url", ["folder\0", "file:///folder%00", "memory://folder\n", "\ud800"])
def test_url_with_characters_that_cannot_be_shown_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be shown"):
        open_storage(url)


def test_what_was_written_is_read(storage: Storage) -> None:
    pieces = [b"abc", bytearray(b"defg"), memoryview(b"hij"), b"", memoryview(b"\x01\x02\x03\x04").cast("H")]
    whole = b"abcdefghij\x01\x02\x03\x04"
    written = storage.write("job/000000000001/file.bin", iter(pieces))
    assert written == Written(len(whole), hashlib.sha256(whole).hexdigest())
    assert storage.size("job/000000000001/file.bin") == len(whole)
    assert storage.exists("job/000000000001/file.bin")
    assert storage.read("job/000000000001/file.bin", 0, len(whole)) == whole
    assert storage.read("job/000000000001/file.bin", 3, 4) == b"defg"
    assert storage.read("job/000000000001/file.bin", 3, 0) == b""
    assert b"".join(storage.read_pieces("job/000000000001/file.bin", 1, 9)) == whole[1:9]


def test_later_write_takes_the_place_of_the_earlier_one(storage: Storage) -> None:
    storage.write("a/file", [b"long, and first"])
    assert storage.size("a/file") == 15
    storage.write("a/file", [b"second"])
    assert storage.size("a/file") == 6
    assert storage.read("a/file", 0, 6) == b"second"


def test_file_of_several_pieces_is_whole(storage: Storage) -> None:
    piece = os.urandom(PIECE_BYTES - 7)
    written = storage.write("big", (piece for _ in range(3)))
    assert written.nbytes == storage.size("big") == 3 * len(piece)
    assert b"".join(storage.read_pieces("big", 0, written.nbytes)) == 3 * piece


def test_lists_show_files_and_folders_apart(storage: Storage) -> None:
    assert storage.list_folders("") == storage.list_folders("job") == ()
    assert storage.list_files("job") == {}
    storage.write("job/2/b", [b"22"])
    storage.write("job/2/a", [b"1"])
    storage.write("job/10/c", [b""])
    storage.write("job/top", [b"333"])
    assert storage.list_folders("") == ("job",)
    assert storage.list_folders("job") == ("10", "2")
    assert storage.list_files("job") == {"top": 3}
    assert list(storage.list_files("job/2").items()) == [("a", 1), ("b", 2)]


def test_what_is_deleted_is_gone_and_deleting_it_again_is_no_error(storage: Storage) -> None:
    for path in ("job/1/a", "job/1/b", "job/2/a"):
        storage.write(path, [b"x"])
    for _ in range(2):
        storage.delete_file("job/1/a")
        assert storage.list_files("job/1") == {"b": 1}
    for _ in range(2):
        storage.delete_folder("job/1")
        assert storage.list_folders("job") == ("2",)
    assert storage.exists("job/2/a")


def test_missing_file_is_named(storage: Storage) -> None:
    storage.write("job/there", [b"x"])
    assert not storage.exists("job/none")
    assert not storage.exists("job")  # a folder is no file
    with pytest.raises(CheckpointNotFound, match=r"job/none is not there"):
        storage.size("job/none")
    with pytest.raises(CheckpointNotFound, match=r"job/none is not there"):
        storage.read("job/none", 0, 1)


def test_file_that_ends_early_is_named_with_the_place(storage: Storage) -> None:
    storage.write("job/short", [b"0123456789"])
    with pytest.raises(CheckpointDamaged, match=r"job/short ends at byte 10; expected 8 bytes from byte 6 on"):
        storage.read("job/short", 6, 8)


@pytest.mark.parametrize("path", ["../out", "a/../b", "/etc/passwd", "a//b", "a/", ".hidden", "a b", "a\0", "~/x"])
def test_no_path_leads_out_of_the_url(path: str, storage: Storage) -> None:
    with pytest.raises(InvalidRequest, match="no path inside"):
        storage.write(path, [b"x"])
    with pytest.raises(InvalidRequest, match="no path inside"):
        storage.read(path, 0, 1)
    with pytest.raises(InvalidRequest, match="no path inside"):
        storage.delete_file(path)


# fsspec's memory has a file as soon as it is opened
@pytest.mark.parametrize("storage", ["folder", "file url", "s3"], indirect=True)
def test_write_that_breaks_off_leaves_the_former_file(storage: Storage) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half of"
        raise CheckpointDamaged("the source")

    storage.write("job/file", [b"former"])
    with pytest.raises(CheckpointDamaged, match="the source"):
        storage.write("job/file", broken())
    with pytest.raises(CheckpointDamaged, match="the source"):
        storage.write("job/other", broken())
    assert storage.list_files("job") == {"file": 6}
    assert storage.read("job/file", 0, 6) == b"former"


@pytest.mark.parametrize("place", ["before_write", "after_write"])
def test_refused_write_names_the_file_and_the_systems_words(place: str, storage: Storage) -> None:
    with failpoints.armed(f"storage.{place}", failpoints.action_of("error:ENOSPC"), at=2):
        with pytest.raises(StorageUnavailable, match=r"cannot write .*job/file: No space left on device") as raised:
            storage.write("job/file", [b"one", b"two", b"three"])
    assert isinstance(raised.value.__cause__, OSError)
    assert "free space" in raised.value.todo_text
    if "memory" not in storage.url:
        assert storage.list_files("job") == {}
    storage.write("job/file", [b"one"])
    assert storage.read("job/file", 0, 3) == b"one"


def test_bucket_that_does_not_exist_is_told(object_store: ObjectStore) -> None:
    storage = open_storage("s3://no-such-bucket/root")
    with pytest.raises(StorageUnavailable, match=r"cannot write s3://no-such-bucket/root/job/x: "):
        storage.write("job/x", [b"x"])
    with pytest.raises(CheckpointNotFound, match=r"s3://no-such-bucket/root/job/x is not there"):
        storage.read("job/x", 0, 1)
    assert object_store.files.ls("") == [BUCKET]


def test_error_of_the_library_under_a_store_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a library's own error")

    for name, call in (("info", Storage.size), ("ls", Storage.list_files), ("rm_file", Storage.delete_file)):
        storage = open_storage("memory://errors")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, name, fail)
            with pytest.raises(StorageUnavailable, match=r"memory://errors/x: a library's own error"):
                getattr(storage, call.__name__)("x")


def test_checkpoints_live_in_an_object_store(object_store: ObjectStore) -> None:
    library = CheckpointLibrary(open_storage(f"s3://{BUCKET}/library"))
    part = PartitionId(0)
    layout = JobLayout(
        (VariableSpec("w", DType.FLOAT32, (4,)),),
        OptimizerSpec("sgd", (make_group("sgd", {}),)),
        (PartitionLayout(part, 64, (Block(0, 0, 4, 0),)),),
    )
    for number in (1, 2, 3, 4):
        state = PartitionState(part, Version(1, number), (BlockState(0, np.full(4, number, np.float32), {}, number),))
        file = write_state(library, "job", library.next_number("job"), state)
        assert library.numbers("job") == tuple(range(1, number))
        entry = PartitionEntry(part, state.version, (PartitionFile(file, (0,)),))
        library.commit(
            Manifest(
                number,
                "job",
                JobId(1),
                0,
                {},
                UpdateMode.SYNC,
                number,
                "2026-11-21T06:00:00+00:00",
                layout,
                (entry,),
                {},
            )
        )
    assert library.jobs() == ("job",)
    assert library.prune("job", 2).checkpoints == (1, 2)
    assert library.storage.list_folders("job") == ("000000000003", "000000000004")
    assert library.verify("job") == ()
    (block,) = load_partition(library, library.load("job"), part).blocks
    assert block.values.tolist() == [4, 4, 4, 4]
    assert [(name, array.tolist()) for name, array in library.export_state(library.load("job", 3))] == [
        ("w", [3.0] * 4)
    ]
    object_store.files.pipe_file(f"{BUCKET}/library/job/{file.path}", bytes(file.written.nbytes))
    assert [(each.number, each.path) for each in library.verify("job")] == [(4, file.path)]


def test_large_object_goes_in_parts_and_a_broken_one_leaves_none(object_store: ObjectStore) -> None:
    storage = open_storage(f"s3://{BUCKET}/parts")
    piece = os.urandom(9 * 1024 * 1024)

    def broken() -> Iterator[bytes]:
        for _ in range(7):
            yield piece
        raise CheckpointDamaged("the source")

    with pytest.raises(CheckpointDamaged, match="the source"):
        storage.write("job/big", broken())
    assert not storage.exists("job/big")
    assert object_store.files.list_multipart_uploads(BUCKET) == []
    written = storage.write("job/big", (piece for _ in range(7)))
    assert storage.size("job/big") == written.nbytes == 7 * len(piece)
    assert storage.read("job/big", len(piece) - 3, 6) == piece[-3:] + piece[:3]
    storage.delete_file("job/big")


def test_what_another_process_has_written_is_seen(object_store: ObjectStore) -> None:
    storage = open_storage(f"s3://{BUCKET}/shared")
    storage.write("job/1/a", [b"x"])
    assert storage.list_files("job/1") == {"a": 1}
    another = s3fs.S3FileSystem(skip_instance_cache=True)
    another.pipe_file(f"{BUCKET}/shared/job/1/b", b"xx")
    another.pipe_file(f"{BUCKET}/shared/job/1/a", b"xxx")
    assert storage.list_files("job/1") == {"a": 3, "b": 2}
    another.rm_file(f"{BUCKET}/shared/job/1/a")
    assert not storage.exists("job/1/a")
    s3fs.S3FileSystem.close_session(another.loop, another.s3)


def test_mark_of_a_folder_is_no_file_in_it(object_store: ObjectStore) -> None:
    storage = open_storage(f"s3://{BUCKET}/marked")
    object_store.files.call_s3("put_object", Bucket=BUCKET, Key="marked/job/")
    storage.write("job/file", [b"x"])
    assert storage.list_files("job") == {"file": 1}
    assert storage.list_folders("job") == ()
    assert storage.list_folders("") == ("job",)


def test_file_that_is_given_up_is_not_put_when_it_is_closed() -> None:
    class Uploading(AbstractBufferedFile):
        uploaded = False

        def _upload_chunk(self, final: bool = False) -> bool:
            type(self).uploaded = True
            return True

    file = Uploading(MemoryFileSystem(), "any", "wb", size=0)
    file.write(b"half")
    storages._abandon(file)
    file.close()
    assert not Uploading.uploaded


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "URL for checkpoints is empty"),
        ("file://elsewhere/path", "names the host 'elsewhere'"),
        ("frob://bucket/path", "frob"),
    ],
)
def test_url_that_nothing_can_open_is_told(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_storage(url)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigurationError, match=r"gs://bucket.*What to do: install it"):
        open_storage("gs://bucket/path")


# ---- the disk


def test_order_on_the_disk_is_write_sync_rename_sync_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def recording(name: str) -> Any:
        real = getattr(os, name)

        def call(first: Any, *rest: Any) -> Any:
            target = Path(os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first)
            shown = "temporary" if target.name.endswith(".tmp") else str(target.relative_to(tmp_path))
            done.append(f"{name} {shown}")
            return real(first, *rest)

        return call

    storage = LocalStorage(tmp_path / "root")
    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(storages.os, name, recording(name))
    storage.write("job/1/file", [b"abc", b"def"])
    assert done == [
        "fsync .",
        "fsync root",
        "fsync root/job",
        "write temporary",
        "write temporary",
        "fsync temporary",
        "replace temporary",
        "fsync root/job/1",
    ]


def test_places_are_before_and_after_every_write_sync_and_rename(tmp_path: Path) -> None:
    seen: list[str] = []
    with failpoints.armed("*", seen.append):
        write_file(tmp_path / "file", [b"x"])
        LocalStorage(tmp_path).delete_file("file")
    steps = ["write", "fsync", "rename", "fsync_folder", "delete", "fsync_folder"]
    assert seen == [f"storage.{when}_{step}" for step in steps for when in ("before", "after")]


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_failure_at_any_place_leaves_no_temporary_file(step: str, when: str, tmp_path: Path) -> None:
    with failpoints.armed(f"storage.{when}_{step}", failpoints.action_of("error")):
        with pytest.raises(StorageUnavailable, match="Input/output error"):
            write_file(tmp_path / "file", [b"x"])
    renamed = (when, step) == ("after", "rename")
    assert [path.name for path in tmp_path.iterdir()] == (["file"] if renamed else [])


@pytest.mark.parametrize("step", ["write", "fsync", "rename", "fsync_folder"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_process_killed_at_any_place_leaves_the_former_file_or_the_new_one(
    step: str, when: str, tmp_path: Path
) -> None:
    write_file(tmp_path / "file", [b"former"])
    code = "import sys; from pathlib import Path; from shardyard.storage.storage import write_file\n"
    code += "from shardyard.runtime.failpoints import arm; arm(sys.argv[2])\n"
    code += "write_file(Path(sys.argv[1]), [b'newest'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file"), f"storage.{when}_{step}=exit"], timeout=60
    )
    assert done.returncode == failpoints.EXIT_CODE
    renamed = step == "fsync_folder" or (when, step) == ("after", "rename")
    assert (tmp_path / "file").read_bytes() == (b"newest" if renamed else b"former")
    left = [name for name in LocalStorage(tmp_path).list_files("") if name != "file"]
    assert len(left) == (0 if renamed else 1)
    for name in left:
        LocalStorage(tmp_path).delete_file(name)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_folder_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "job" / "file").mkdir(parents=True)
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageUnavailable, match=r"cannot write .*job/file: Is a directory"):
        storage.write("job/file", [b"x"])
    with pytest.raises(StorageUnavailable, match=r"cannot read .*job/file: Is a directory"):
        storage.read("job/file", 0, 1)
    (tmp_path / "plain").write_text("x")
    with pytest.raises(StorageUnavailable, match=r"cannot write .*plain/file: "):
        storage.write("plain/file", [b"x"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "job", "plain"]


def test_folder_sync_that_a_file_system_does_not_know_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(storages.os, "fsync", fsync)
    assert write_file(tmp_path / "file", [b"x"]).nbytes == 1


def test_tally_is_that_of_all_pieces() -> None:
    tally = storages.Tally()
    for piece in (b"ab", memoryview(b"cd\0\0").cast("H"), b""):
        tally.add(piece)
    assert tally.written == Written(6, hashlib.sha256(b"abcd\0\0").hexdigest())
