"""A checkpoint that was changed on its storage, digests included, is refused: promise S5."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints import rows_file
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import FileRef, TableEntry
from shardyard.checkpoints.rows_file import Removed, RowsFileKey
from shardyard.checkpoints.table_state import TableState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.ids import Generation, PartitionId, Token
from shardyard.domain.tables.row_ids import partition_of
from shardyard.security.authority import Authority
from shardyard.security.identity import Role
from shardyard.security.signatures import YardKeys, keys_of
from shardyard.storage.json_reader import canonical, seal
from shardyard.storage.storage import LocalStorage
from shardyard_coordinator.core.effects import Base, RestorePartitions, TakeCheckpoint
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.storage.checkpoint_book import Draft
from shardyard_launcher.commands.checkpoint import checkpoint
from tests.support.checkpoint_libraries import JOB, REMEMBERED, write_whole
from tests.support.identities import Identities
from tests.support.table_checkpoints import IDS
from tests.support.table_checkpoints import LAYOUT as WITH_TABLES
from tests.unit.coordinator.service.test_checkpoint_io import HEARTBEAT_MS, NOW, Yard


class SigningYard(Yard):
    """Checkpoints 1 and 2 of job `ads`, of one yard; its values have changed since."""

    def __init__(self, folder: Path) -> None:
        super().__init__(UpdateMode.ASYNC)
        self.identities = Identities(folder / "identity")
        self.kept = folder / "kept"
        self.archive = self.archive_of(self.identities.authority)
        for number in (1, 2):
            self.push(number - 1)
            self.take_with(self.kept, number, base=number - 1)
        self.saved = self.values()
        self.push(2)

    def archive_of(self, authority: Authority | None) -> CheckpointIO:
        return CheckpointIO(
            self.servers, feedback=self.feedback, heartbeat_ms=HEARTBEAT_MS, authority=authority, now=lambda: NOW
        )

    def take_with(self, folder: Path, number: int, base: int) -> None:
        """Takes a checkpoint with a data ledger from which a run can begin."""
        draft = Draft(number, 0, {"entries": [], "closed": [], "token": 0}, Token(1))
        self.archive.take(TakeCheckpoint(self.spec, self.map, draft, str(folder), base, 3))

    def restore_base(self, base: Base) -> None:
        self.map = self.map_of([3, 3, 3, 3], Generation(self.map.generation + 1))
        lost = frozenset(PartitionId(each) for each in range(4))
        self.archive.restore(RestorePartitions(self.spec, self.map, str(self.kept), (base,), 2, lost))
        self.lease()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[SigningYard]:
    found = SigningYard(tmp_path)
    yield found
    found.servers.close()
    found.wait_registry.close()
    for store in found.stores.values():
        store.close()


def manifest_in(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}" / manifests.NAME


def resealed(text: bytes, signature: str | None = None, **changes: Any) -> bytes:
    """A manifest with other values and the digest that belongs to them. `signature`: instead of the one that it has;
    empty: none."""
    sealed = json.loads(text)
    document = sealed["manifest"] | changes
    signed = sealed.get("signature", "") if signature is None else signature
    digest = hashlib.sha256(canonical(document)).hexdigest()
    assert manifests.decode(seal("manifest", document), "it")
    tail = f',"signature":"{signed}"' if signed else ""
    return b'{"manifest":%b,"sha256":"%b"%b}\n' % (canonical(document), digest.encode(), tail.encode())


def change_with_digest(folder: Path, manifest: Path, file: FileRef) -> None:
    """Changes a byte of a file of a checkpoint, and its digest in the manifest."""
    path = folder / file.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    document = json.loads(manifest.read_text().replace(file.written.sha256, digest))["manifest"]
    manifest.write_bytes(resealed(manifest.read_bytes(), **document))


def refused_everywhere(yard: SigningYard, number: int) -> None:
    """By `checkpoint restore`, by the recovery from a failure, and as what the next checkpoint builds on."""
    with pytest.raises(CheckpointDamaged, match="is not signed by this yard") as caught:
        yard.archive.find(str(yard.kept), "ads", number)
    command = f"shardyard checkpoint restore ads --number {number} --url {yard.kept} --trust"
    assert command in caught.value.todo_text
    with pytest.raises(CheckpointDamaged, match="is not signed by this yard"):
        yard.restore_base(Base(number))
    with pytest.raises(CheckpointDamaged, match="is not signed by this yard"):
        yard.take_with(yard.kept, number + 1, base=number)


def test_checkpoint_of_this_yard_is_restored(yard: SigningYard) -> None:
    found, skipped = yard.archive.find(str(yard.kept), "ads", 0)
    assert (found.number, found.trusted, skipped) == (2, "", ())
    yard.restore_base(Base(2))
    assert yard.values() == yard.saved


@pytest.mark.parametrize("change", ["a value", "the step", "the yard", "no signature", "another's signature"])
def test_changed_manifest_is_refused(yard: SigningYard, tmp_path: Path, change: str) -> None:
    path = manifest_in(yard.kept / "ads", 2)
    text = path.read_bytes()
    if change == "a value":
        file = next(manifests.decode(text, "it").files())
        change_with_digest(yard.kept / "ads", path, file)
    else:
        stranger = Identities(tmp_path / "stranger").authority
        digest = json.loads(text)["sha256"]
        path.write_bytes(
            {
                "the step": lambda: resealed(text, step=77),
                "the yard": lambda: resealed(text, yard="yard-0123456789abcdef"),
                "no signature": lambda: resealed(text, signature=""),
                "another's signature": lambda: resealed(
                    text, signature=stranger.sign(manifests.signed_text(digest)).hex()
                ),
            }[change]()
        )
    refused_everywhere(yard, 2)


@pytest.mark.parametrize("number", [1, 3])
def test_signed_manifest_of_another_number_is_refused(yard: SigningYard, number: int) -> None:
    target = manifest_in(yard.kept / "ads", number)
    target.parent.mkdir(exist_ok=True)
    shutil.copy(manifest_in(yard.kept / "ads", 2), target)
    with pytest.raises(CheckpointDamaged, match="is that of checkpoint 2 of job 'ads'"):
        yard.archive.find(str(yard.kept), "ads", number)
    with pytest.raises(CheckpointDamaged, match="is that of checkpoint 2 of job 'ads'"):
        yard.restore_base(Base(number))


def test_signed_manifest_of_another_job_is_refused(yard: SigningYard) -> None:
    shutil.copytree(yard.kept / "ads", yard.kept / "other")
    with pytest.raises(CheckpointDamaged, match="is that of checkpoint 2 of job 'ads'"):
        yard.archive.find(str(yard.kept), "other", 2)


def test_restore_passes_over_a_checkpoint_that_is_not_signed(yard: SigningYard) -> None:
    path = manifest_in(yard.kept / "ads", 2)
    path.write_bytes(resealed(path.read_bytes(), step=77))
    found, skipped = yard.archive.find(str(yard.kept), "ads", 0)
    assert (found.number, skipped) == (1, (2,))


def test_checkpoint_of_another_yard_is_trusted_as_it_was_when_that_was_ordered(
    yard: SigningYard, tmp_path: Path
) -> None:
    yard.archive = yard.archive_of(Identities(tmp_path / "new yard").authority)
    refused_everywhere(yard, 2)
    found, _ = yard.archive.find(str(yard.kept), "ads", 0, trust=True)
    assert found.number == 2
    yard.restore_base(Base(2, trusted=found.trusted))
    assert yard.values() == yard.saved
    path = manifest_in(yard.kept / "ads", 2)
    path.write_bytes(resealed(path.read_bytes(), step=77))
    with pytest.raises(CheckpointDamaged, match="is not signed by this yard"):
        yard.restore_base(Base(2, trusted=found.trusted))


def test_checkpoint_stays_valid_under_a_former_key_of_the_yard(yard: SigningYard, tmp_path: Path) -> None:
    former, newer = yard.identities.authority, Identities(tmp_path / "newer").authority
    storage = LocalStorage(yard.kept)
    both = YardKeys(former.yard, (newer.public_key, former.public_key))
    assert CheckpointLibrary(storage, both).load("ads").yard == former.yard
    with pytest.raises(CheckpointDamaged, match="is not signed by this yard"):
        CheckpointLibrary(storage, YardKeys(former.yard, (newer.public_key,))).load("ads")


def test_yard_without_tls_neither_signs_nor_checks(yard: SigningYard) -> None:
    path = manifest_in(yard.kept / "ads", 2)
    path.write_bytes(resealed(path.read_bytes(), step=77))
    yard.archive = yard.archive_of(None)
    assert yard.archive.find(str(yard.kept), "ads", 0)[0].step == 77
    yard.take_with(yard.kept, 3, base=2)
    written = json.loads(manifest_in(yard.kept / "ads", 3).read_text())
    assert (written["manifest"]["yard"], "signature" in written) == ("", False)


# ---- every kind of file


def test_residual_that_was_changed_is_refused(tmp_path: Path) -> None:
    library = CheckpointLibrary(LocalStorage(tmp_path / "kept"))
    manifest = write_whole(library, 1, feedback=True)
    (kept,) = manifest.feedback
    assert library.load_feedback(JOB, kept, manifest.layout).keys() == REMEMBERED.keys()
    change_with_digest(tmp_path / "kept" / JOB, manifest_in(tmp_path / "kept" / JOB, 1), kept.file)
    with pytest.raises(CheckpointDamaged, match="SHA-256"):
        library.load_feedback(JOB, kept, manifest.layout)


def test_rows_that_were_changed_are_refused(tmp_path: Path) -> None:
    storage, path = LocalStorage(tmp_path), "000000000001/rows-0000-0000-1-1-000000.safetensors"
    key = RowsFileKey(WITH_TABLES, PartitionId(0), 0, base=False)
    removed = Removed(IDS[partition_of(IDS, len(WITH_TABLES.partitions)) == 0][:5])
    file = FileRef(path, storage.write(path, rows_file.pieces(key, removed)))
    table = TableState(storage, "", WITH_TABLES, PartitionId(0), 0, TableEntry(1, 0, 0, increments=(file,)))
    assert isinstance(table.read(file), Removed)
    content = bytearray((tmp_path / path).read_bytes())
    content[-1] ^= 1
    (tmp_path / path).write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="SHA-256"):
        table.read(file)


# ---- commands


def test_commands_check_signatures_by_the_certificate_of_their_yard(yard: SigningYard, tmp_path: Path) -> None:
    own = yard.identities.of(Role.OPERATOR)
    stranger = Identities(tmp_path / "stranger").of(Role.OPERATOR)
    keys = keys_of(own.pem)
    assert keys == yard.identities.authority.keys

    def command(name: str, folder: Path, *more: str) -> tuple[int, str]:
        place = ("--url", str(yard.kept), "--set", f"security.identity={folder}")
        found = CliRunner().invoke(checkpoint, [name, *place, *more], standalone_mode=False)
        if isinstance(found.exception, CheckpointDamaged):
            return 1, found.exception.what
        return found.return_value, found.output

    out = str(tmp_path / "model.safetensors")
    name = yard.identities.authority.yard
    assert command("verify", own.folder) == (0, f"job ads: whole, signed by {name}: 1, 2\n")
    code, said = command("verify", stranger.folder)
    assert code == 1
    assert "checkpoint 2: 000000000002/manifest.json" in said
    assert "is not signed by this yard" in said
    assert command("verify", stranger.folder, "--trust") == (0, "job ads: whole: 1, 2\n")
    assert name in command("list", own.folder)[1]
    assert "(not valid here)" in command("list", stranger.folder)[1]
    listed = json.loads(command("list", own.folder, "--json")[1])["checkpoints"]
    assert {(each["yard"], each["signature"]) for each in listed} == {(name, "valid")}
    code, said = command("export", stranger.folder, "--format", "safetensors", out)
    assert code == 1
    assert "is not signed by this yard" in said
    assert command("export", stranger.folder, "--trust", "--format", "safetensors", out)[0] == 0


def test_authority_from_elsewhere_signs_nothing_that_commands_could_check(tmp_path: Path) -> None:
    pem = Identities(tmp_path / "one").of(Role.OPERATOR).pem
    other = Identities(tmp_path / "two").of(Role.OPERATOR).pem
    elsewhere = type(pem)(pem.key, pem.certificate, other.authorities)
    assert keys_of(elsewhere) is None
