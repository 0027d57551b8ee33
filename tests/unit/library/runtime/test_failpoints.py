"""Every failpoint of the shipped code: each is passed, and what fails there does no harm
(docs/internals/architecture.md).

Other tests try single places harder (test_checkpoint_storage, test_writing), kill processes there
(test_checkpoint_library, tests/chaos), or lose the replies (tests/fuzz/test_replies.py). Here it is held that none was
forgotten: a place in the source for which there is no scenario fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.domain.errors import Internal, ShardyardError
from shardyard.domain.ids import PartitionId
from shardyard.domain.push_names import SourceKey
from shardyard.runtime.failpoints import armed
from shardyard.storage.storage import open_storage
from shardyard.transport.dispatch import REPLY
from shardyard_coordinator.service.journal import Journal
from shardyard_launcher.yard.role_process import RoleProcess
from shardyard_launcher.yard.state_file import STATE_FILE, YardState, read_state
from tests.support import rows_in_pushes as rows
from tests.support import server_checkpoints as servers
from tests.support import servers_with_logs as logs
from tests.unit.coordinator.service import test_checkpoint_io as archives

ROOT: Final = Path(__file__).resolve().parents[4]
PACKAGES: Final = ("shardyard", "coordinator", "ps_server", "worker", "launcher")


def places() -> dict[str, list[str]]:
    """The names of all failpoints in the source, and where each stands. Names that are made are "*"."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "failpoint(" in text else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                    (name,) = node.args
                    place = str(name.value) if isinstance(name, ast.Constant) else "*"
                    found.setdefault(place, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


KILLS: Final = {"push.before_publish"}
"""Where only the end of the process can come between: what was there is in its memory alone, and half changed."""


class Broken(OSError):
    """What an armed place raises, as a disk would."""


@contextmanager
def broken(place: str) -> Iterator[list[str]]:
    """The place fails the first time that it is passed. Gives what was passed there."""
    passed: list[str] = []

    def fail(name: str) -> None:
        passed.append(name)
        raise Broken(28, "No space left on device", name)

    with armed(place, fail, at=1):
        yield passed


def in_storage(place: str, folder: Path) -> list[str]:
    """A file is the former or the new one, and what failed can be done again."""
    url = f"memory://{folder.name}" if place.endswith("_commit") else str(folder)
    storage = open_storage(url)
    storage.write("job/file", [b"former"])

    def use() -> None:
        storage.write("job/file", [b"a later one"])
        storage.delete_file("job/file")

    with broken(place) as passed, pytest.raises(ShardyardError):
        use()
    left = storage.list_files("job")
    assert left in ({"file": 6}, {"file": 11}, {}), "half of a file, or another one beside it"
    storage.write("job/file", [b"a later one"])
    assert storage.read("job/file", 0, 11) == b"a later one"
    return passed


def in_archive(place: str, folder: Path) -> list[str]:
    """A checkpoint is there whole or not at all, and another one can be taken."""
    yard = archives.Yard(archives.UpdateMode.ASYNC)
    try:
        yard.push(0)
        with broken(place) as passed, pytest.raises(Broken):
            yard.take(folder, 1)
        library = CheckpointLibrary(open_storage(str(folder)))
        assert library.numbers("ads") == ((1,) if place.endswith("after_manifest") else ())
        yard.take(folder, 2)
        assert library.numbers("ads")[-1] == 2
        assert list(library.verify("ads")) == []
    finally:
        yard.servers.close()
        yard.wait_registry.close()
        for store in yard.stores.values():
            store.close()
    return passed


def in_journal(place: str, folder: Path) -> list[str]:
    """All records of a step, or none, are there when the journal is opened again."""
    former, later = ("kind", {"number": 1}), ("kind", {"number": 2})
    journal = Journal(folder)
    journal.append([former])

    def use() -> None:
        journal.append([later, later])
        journal.replace([later])

    with broken(place) as passed, pytest.raises(Broken):
        use()
    journal.close()
    again = Journal(folder)
    found = [record.body["number"] for record in again.records()]
    again.close()
    whole = {
        "journal.before_append": [1],
        "journal.before_commit": [1],
        "journal.after_append": [1, 2, 2],
        "journal.in_replace": [1, 2, 2],
        "journal.after_replace": [2],
    }
    assert found == whole[place]
    return passed


def in_push(place: str, folder: Path) -> list[str]:
    """A push that is sent again, since its answer did not come, counts once in each partition."""
    undisturbed, store = servers.leased(servers.server()), servers.leased(servers.server())
    servers.push(undisturbed, 0)
    saved = servers.save(store, folder, 1)
    with broken(place) as passed, pytest.raises(Broken):
        servers.push(store, 0)
    if place in KILLS:
        store = servers.restored(folder, servers.entries(saved))
    servers.push(store, 0)
    assert servers.values(store) == servers.values(undisturbed)
    while servers.MADE:
        servers.MADE.pop().close()
    return passed


def in_log(place: str, folder: Path) -> list[str]:
    """What was acknowledged is what a successor has; what was not may be there, whole."""
    yard = logs.Yard(folder)
    try:
        first = yard.first()
        saved = yard.save(first, 2)
        logs.push(first, 0)
        acknowledged = 1
        with broken(place) as passed, suppress(ShardyardError, OSError):
            logs.push(first, 1)
            acknowledged = 2
            yard.save(first, 3)
            yard.successor(saved, 2, logs.FIRST)
        last = yard.successor(saved, 2, logs.FIRST, incarnation=logs.THIRD)
        key = SourceKey(logs.SHARD)
        nexts = {last.hosted()[0].partitions[PartitionId(number)].watermark(key).next for number in (0, 1)}
        assert len(nexts) == 1
        assert nexts <= {acknowledged, 2}
    finally:
        yard.close()
    return passed


def in_yard(place: str, folder: Path) -> list[str]:
    """The state file is the former one or the new one."""
    role = RoleProcess("server-0", "server", 1, 0.5, folder / "log", "h:1", ready=True)
    YardState((role,)).write(folder)
    with broken(place) as passed, pytest.raises(Broken):
        YardState((role, role)).write(folder)
    found = read_state(folder)
    assert found is not None
    assert len(found.processes) == (2 if place == "yard.after_rename" else 1)
    assert STATE_FILE in {each.name for each in folder.iterdir()}
    return passed


def in_rows(place: str, folder: Path) -> list[str]:
    """What would be half a push is none: the partition takes nothing more, and the server is told to end."""
    told: list[ShardyardError] = []
    store = rows.server(on_failure=told.append)
    try:
        with broken(place) as passed, pytest.raises(Broken):
            rows.push(store, rows.push_order(0, rows.GOOD), rows.DENSE + rows.GOOD_DATA)
        for order in rows.push_order(0, rows.GOOD), rows.push_order(1, rows.GOOD):
            with pytest.raises(Internal, match="applied in part"):
                rows.push(store, order, rows.DENSE + rows.GOOD_DATA)
        assert [error.code for error in told[:1]] == ["Internal"]
    finally:
        store.close()
    return passed


SCENARIOS: Final[dict[str, Callable[[str, Path], list[str]]]] = {
    "storage": in_storage,
    "checkpoint": in_archive,
    "journal": in_journal,
    "push": in_push,
    "rows": in_rows,
    "wal": in_log,
    "yard": in_yard,
}
PLACES: Final = places()
MADE: Final = [where for where in PLACES.pop("*", []) if "transport/dispatch.py" not in where]
"""Names that are made elsewhere than for replies, each of which tests/fuzz/test_replies.py loses."""


def test_every_failpoint_has_a_name_that_can_be_found() -> None:
    assert MADE == []
    assert {name.partition(".")[0] for name in PLACES} <= SCENARIOS.keys() | {REPLY}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_failure_at_any_place_does_no_harm(place: str, tmp_path: Path) -> None:
    assert SCENARIOS[place.partition(".")[0]](place, tmp_path) == [place], "the scenario does not come by this place"
