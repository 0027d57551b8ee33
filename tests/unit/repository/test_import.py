"""What an import costs and brings, and what the wheel installs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("shardyard", "shardyard_coordinator", "shardyard_launcher", "shardyard_ps_server", "shardyard_worker")
IMPORT_S_MAX = 0.3
RUNS = 5
TIMEOUT_S = 60


def run(code: str, *, cwd: Path | None = None, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHARDYARD"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env={**clean, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_shardyard_is_light() -> None:
    code = (
        "import sys, time; begin = time.perf_counter(); import shardyard; took = time.perf_counter() - begin\n"
        "heavy = {'torch', 'grpc', 'numba', 'numpy', 'google.protobuf', 'pydantic'} & set(sys.modules)\n"
        "print(took, ','.join(sorted(heavy)))"
    )
    found = [run(code).split(" ") for _ in range(RUNS)]
    assert {heavy.strip() for _, heavy in found} == {""}
    assert min(float(took) for took, _ in found) < IMPORT_S_MAX


BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"no {name} here")
sys.meta_path.insert(0, Block())
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch is not blocked")
"""


def test_server_and_coordinator_need_no_torch() -> None:
    code = BLOCK_TORCH + (
        "import importlib, pkgutil\n"
        "for root in ('shardyard', 'shardyard_ps_server', 'shardyard_coordinator'):\n"
        "    package = importlib.import_module(root)\n"
        "    for module in pkgutil.walk_packages(package.__path__, root + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(len(sys.modules))"
    )
    assert int(run(code)) > 0


def test_coordinator_needs_no_compiler() -> None:
    """Its image has none, and its process starts without."""
    code = (
        "import sys\n"
        "sys.modules.update(numba=None, llvmlite=None)\n"
        "import shardyard_coordinator.service.process, shardyard_launcher.commands.checkpoint\n"
        "import shardyard.checkpoints.library, shardyard.checkpoints.row_exports, shardyard.wire.push_messages\n"
        "print(len(sys.modules))"
    )
    assert int(run(code)) > 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout.split("\0")
    wanted = (
        "shardyard/",
        "ps_server/",
        "worker/",
        "coordinator/",
        "launcher/",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    )
    for name in listed:
        if name.startswith(wanted) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=TIMEOUT_S)
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_ships_five_unique_names_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert "shardyard/py.typed" in names
    assert {"shardyard/wire/v1/common_pb2.py", "shardyard/wire/v1/common_pb2.pyi"} <= set(names)


def test_installed_wheel_lives_beside_modules_named_like_roles(wheel: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "site", tmp_path / "work"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, capture_output=True, timeout=TIMEOUT_S)
    for name in ("worker.py", "coordinator.py", "worker/__init__.py", "launcher/__init__.py", "ps_server/__init__.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("MINE = True\n")
    # -S and no .pth: the editable install of the checkout cannot be what is found
    third_party = [path for path in sys.path if path.endswith("site-packages")]
    code = (
        f"import sys; sys.path += {third_party!r}\n"
        "import importlib, shardyard, worker, coordinator, launcher, ps_server\n"
        "assert worker.MINE and coordinator.MINE and launcher.MINE and ps_server.MINE\n"
        f"for name in {PACKAGES!r}:\n"
        "    print(importlib.import_module(name).__file__)\n"
        "import shardyard_coordinator.service.service, shardyard_ps_server.hosting.store, shardyard_launcher.cli\n"
        "print(shardyard_ps_server.hosting.store.__file__); print(shardyard.__version__)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHARDYARD"))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=work,
        env={**clean, "PYTHONPATH": os.pathsep.join((".", str(target)))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *files, release = done.stdout.split()
    assert len(files) == len(PACKAGES) + 1
    assert all(Path(file).is_relative_to(target) for file in files), files
    assert release
