"""`shardyard checkpoint`: what it prints and how it ends, and that an export loads into the model it came from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, PartitionEntry, PartitionFile
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.config.settings import JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import JobId, Version
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.runtime import failpoints
from shardyard.storage.storage import LocalStorage
from shardyard.transport.error_codes import to_detail
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.placement.placement import plan
from shardyard_launcher.cli import main
from tests.support.checkpoints import write_state
from tests.support.launcher_replies import serving

DEFAULT_URL = ".shardyard/coordinator/checkpoints"


class Net(torch.nn.Module):
    """Parameters of several shapes, and buffers: BatchNorm's (one a whole number without dimensions), a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(30, 11)
        self.norm = torch.nn.BatchNorm1d(11)
        self.last = torch.nn.Linear(11, 3).double()
        self.register_buffer("mask", torch.rand(11) > 0.5)
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def filled(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(
                torch.rand(value.shape) * 100 > 50 if value.dtype == torch.bool else torch.rand(value.shape) * 9
            )
    return model


def save(model: Net, number: int, *, job: str = "digits", url: str = DEFAULT_URL) -> Manifest:
    """A checkpoint of the model, cut into blocks and partitions as the coordinator would."""
    held = {name: value.numpy() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    specs = [
        VariableSpec(
            name,
            DType(value.dtype.name),
            value.shape,
            VariableKind.PARAMETER if name in parameters else VariableKind.BUFFER,
        )
        for name, value in held.items()
    ]
    optimizer = OptimizerSpec("sgd", (make_group("sgd", {}),))
    layout = plan(specs, optimizer, partitions=3, block_bytes=256)
    library = CheckpointLibrary(LocalStorage(Path(url)))
    entries = []
    for part in layout.partitions:
        blocks = []
        for index, block in enumerate(part.blocks):
            flat = held[specs[block.variable].name].reshape(-1)
            blocks.append(BlockState(index, flat[block.offset : block.offset + block.length], {}, 1))
        state = PartitionState(part.partition, Version(1, number), tuple(blocks))
        file = write_state(library, job, number, state)
        taken = PartitionFile(file, tuple(range(len(part.blocks))))
        entries.append(PartitionEntry(part.partition, state.version, (taken,)))
    manifest = Manifest(
        number, job, JobId(1), 0, JobSettings(name=job).model_dump(mode="json"), UpdateMode.SYNC, 1_000 * number,
        "2026-11-21T06:00:00+00:00", layout, tuple(entries), {"entries": [], "closed": 0, "token": 0},
    )  # fmt: skip
    library.commit(manifest)
    return manifest


def file_of(manifest: Manifest, partition: int) -> Path:
    return Path(DEFAULT_URL) / manifest.job_name / manifest.partitions[partition].files[0].file.path


# ---- export


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_export_loads_into_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = filled(1)
    save(model, 1)
    assert main(["checkpoint", "export", "model.pt"]) == 0
    assert capsys.readouterr().out == "model.pt: 10 variables of checkpoint 1 of job digits, step 1000\n"
    state = torch.load("model.pt", weights_only=True)
    assert same(state, dict(model.state_dict()))
    other = filled(2)
    assert other.load_state_dict(state) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    x = torch.rand(4, 30)
    assert torch.equal(other.eval().norm(other.first(x)), model.eval().norm(model.first(x)))


def test_safetensors_export_loads_into_the_model(tmp_path: Path) -> None:
    model = filled(1)
    save(model, 1)
    assert main(["checkpoint", "export", "--format", "safetensors", "model one.safetensors"]) == 0
    state = safetensors.torch.load_file("model one.safetensors")
    assert same({name: state[name] for name in model.state_dict()}, dict(model.state_dict()))
    other = filled(2)
    other.load_state_dict(state)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_export_of_a_number_is_of_that_checkpoint() -> None:
    for number in (1, 2):
        save(filled(number), number)
    for number, expected in ((["--number", "1"], 1), ([], 2)):
        assert main(["checkpoint", "export", *number, "--force", "model.pt"]) == 0
        assert same(torch.load("model.pt", weights_only=True), dict(filled(expected).state_dict()))


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_export_writes_over_nothing_and_leaves_no_half_file(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = save(filled(1), 1)
    out = Path("model.pt")
    out.write_text("mine")
    assert main(["checkpoint", "export", "--format", form, "model.pt"]) == 1
    assert "model.pt exists already" in capsys.readouterr().err
    damaged = file_of(manifest, 0)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["checkpoint", "export", "--format", form, "--force", "model.pt"]) == 1
    assert damaged.name in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert [path.name for path in Path().iterdir() if path.is_file()] == ["model.pt"]


def test_disk_that_is_full_is_told_by_export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(filled(1), 1)
    with failpoints.armed("storage.before_write", failpoints.action_of("error:ENOSPC"), at=2):
        assert main(["checkpoint", "export", "--format", "safetensors", "model.st"]) == 1
    assert "cannot write model.st: No space left on device" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert main(["checkpoint", "export", "model.pt"]) == 1
    assert re.search("cannot write model.pt: .*No space left on device", capsys.readouterr().err)
    assert [path.name for path in Path().iterdir() if path.is_file()] == []


# ---- list, verify, prune


def test_list_shows_every_checkpoint_with_what_is_new_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list"]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {DEFAULT_URL}; --url or --state names another place\n"
    first = save(filled(1), 1)
    save(filled(1), 2, job="another")
    library = CheckpointLibrary(LocalStorage(Path(DEFAULT_URL)))
    library.commit(manifests.Manifest(**{name: getattr(first, name) for name in first.__slots__} | {"number": 2}))
    nbytes = sum(file.written.nbytes for file in first.files())
    assert main(["checkpoint", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["another", "2", "2,000", "sync"],
        ["digits", "1", "1,000", "sync"],
        ["digits", "2", "1,000", "sync"],
    ]
    assert lines[2].split()[-2:] == [f"{nbytes:,}"] * 2
    assert lines[3].split()[-2:] == [f"{nbytes:,}", "0"]
    assert main(["checkpoint", "list", "--json", "--job", "digits"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["url"] == DEFAULT_URL
    assert listed["checkpoints"][1] == {
        "job": "digits",
        "number": 2,
        "damage": None,
        "step": 1_000,
        "mode": "sync",
        "created": "2026-11-21T06:00:00+00:00",
        "yard": "",
        "signature": "none",
        "partitions": 3,
        "tables": [],
        "files": 3,
        "bytes": nbytes,
        "new_bytes": 0,
    }


def test_list_goes_on_past_a_damaged_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        save(filled(1), number)
    (Path(DEFAULT_URL) / "digits" / manifests.folder_name(1) / manifests.NAME).write_bytes(b"x")
    assert main(["checkpoint", "list"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["1", "2"]
    assert main(["checkpoint", "list", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert "does not begin as a manifest" in first["damage"]
    assert second["damage"] is None


def test_verify_names_what_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    save(filled(1), 1)
    manifest = save(filled(2), 2)
    assert main(["checkpoint", "verify"]) == 0
    assert capsys.readouterr().out == "job digits: whole: 1, 2\n"
    file = file_of(manifest, 1)
    file.write_bytes(file.read_bytes() + b"x")
    assert main(["checkpoint", "verify"]) == 1
    captured = capsys.readouterr()
    assert re.search(rf"^checkpoint 2: \d+/{file.name}: .*{file.name} has \d+ bytes; expected", captured.out)
    assert captured.err == "job digits: damaged: 2\n"
    assert main(["checkpoint", "verify", "--number", "1"]) == 0
    assert capsys.readouterr().out == "job digits: whole: 1\n"
    assert main(["checkpoint", "verify", "--number", "9"]) == 1
    assert "no checkpoint 9" in capsys.readouterr().err


def test_prune_says_what_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        save(filled(1), number)
    assert main(["checkpoint", "prune", "--keep", "2"]) == 0
    assert re.fullmatch(r"job digits: deleted checkpoints 1; 4 files, [\d,]+ bytes\n", capsys.readouterr().out)
    assert main(["checkpoint", "prune", "--keep", "2"]) == 0
    assert capsys.readouterr().out == "job digits: deleted no checkpoint; 0 files, 0 bytes\n"
    assert main(["checkpoint", "verify"]) == 0
    assert capsys.readouterr().out == "job digits: whole: 2, 3\n"


@pytest.fixture
def two_jobs() -> None:
    for job in ("one", "two"):
        save(filled(1), 1, job=job)


@pytest.mark.usefixtures("two_jobs")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["verify"], 1, "has checkpoints of 2 jobs: one, two"),
        (["verify", "--job", "three"], 1, "no checkpoints of job 'three'"),
        (["verify", "--job", "two"], 0, ""),
        (["export", "x.pt"], 1, "say which with --job"),
        (["export", "--job", "one", "--number", "2", "x.pt"], 1, "manifest.json is not there"),
        (["export", "--job", "one", "--format", "onnx", "x.pt"], 2, "'onnx' is not one of"),
        (["prune", "--job", "one", "--keep", "1"], 2, "1 is not in the range"),
        (["prune", "--job", "one"], 2, "Missing option '--keep'"),
        (["list", "--job", "../one"], 1, "no job's name"),
        (["verify", "--url", "nowhere"], 1, "no checkpoints in nowhere"),
        (["list", "--url", "frob://x"], 2, "'frob://x' is not a URL for checkpoints"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *arguments]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_arrays_of_an_export_are_the_machines_own_and_may_be_written() -> None:
    library = CheckpointLibrary(LocalStorage(Path(DEFAULT_URL)))
    for _, array in library.export_state(save(filled(1), 1)):
        assert array.flags.writeable
        assert array.dtype == np.dtype(array.dtype.name)


# ---- orders to a coordinator


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with checkpoints 3 and 4 of a job."""
    for number in (3, 4):
        save(filled(1), number, url=str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_order_for_the_next_run_is_given_and_taken_back(
    coordinator: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restore = ["checkpoint", "restore", "digits", "--coordinator", coordinator]
    assert main([*restore, "--cancel"]) == 1
    assert "no restore was ordered for the next run of job 'digits'" in capsys.readouterr().err
    assert main([*restore, "--number", "3", "--url", str(kept)]) == 0
    assert capsys.readouterr().out == f"job digits starts its next run from checkpoint 3, step 3,000, in {kept}\n"
    assert main([*restore, "--cancel"]) == 0
    assert capsys.readouterr().out == "the next run of job digits starts from the beginning\n"
    assert main([*restore, "--cancel"]) == 1, "it was taken back"


def test_damaged_checkpoint_is_passed_over_and_told(
    coordinator: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next((kept / "digits" / f"{4:012d}").glob("*.safetensors")).write_bytes(b"")
    assert main(["checkpoint", "restore", "digits", "--url", str(kept), "--coordinator", coordinator]) == 0
    captured = capsys.readouterr()
    assert "from checkpoint 3" in captured.out
    assert "checkpoint 4 is damaged, or not signed by this yard, and is not used" in captured.err


def test_checkpoint_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "take", "digits", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_checkpoint_is_asked_for_until_it_is_there_or_was_refused(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked first for the only job, then for what became of the ticket."""
    asked: list[tuple[str, int]] = []

    def take(request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
        asked.append((request.job_name, request.ticket))
        if len(asked) < 3:
            return wire.TakeCheckpointReply(job_name="digits", ticket=7)
        if fails:
            return wire.TakeCheckpointReply(failure=to_detail(errors.StorageUnavailable("no space left")))
        return wire.TakeCheckpointReply(job_name="digits", done=True, number=7, step=4_950, url="/kept")

    with serving({methods.TAKE_CHECKPOINT: take}) as address:
        assert main(["checkpoint", "take", "--coordinator", address]) == int(fails)
    assert asked == [("", 0), ("digits", 7), ("digits", 7)]
    captured = capsys.readouterr()
    if fails:
        assert "no space left" in captured.err
    else:
        assert captured.out == "checkpoint 7 of job digits, step 4,950, in /kept\n"
