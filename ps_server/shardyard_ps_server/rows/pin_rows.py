"""Which rows of one partition readers hold, and what a push owes them before it changes any (rule C7).

    nobody holds    a push changes rows at once; a reader that comes meanwhile comes too late, until it has counted
    somebody does   what a push is about to change is set aside, and kept for all who hold, and those who come meanwhile
    given up        there is no memory for what changes: all lose their versions, and who comes now comes too late

Owns: the rows of each version that is held, and what the push under way has set aside. Invariants: rows of which
something was not set aside are held by nobody; no push is refused, or waits, for a reader. Pure; the partition calls it
under its lock. Must not know: tables, ledgers, threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardyard_ps_server.rows.pinned_rows import PinnedRows
from shardyard_ps_server.rows.previous_rows import PreviousRows
from shardyard_ps_server.values.versions import VersionPin


class PinRows:
    """`bytes_max`: that are kept for one version."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[VersionPin, PinnedRows] = {}
        self._under_way: list[PreviousRows] = []
        self.come_too_late = False
        """Whether rows are being changed that nobody has set aside: who wants them waits for the end of the push."""

    # ---- readers

    def hold(self, wanted: VersionPin, newest: int, former: PreviousRows | None) -> bool:
        """Keeps the rows of a version from now on, if all that has changed, or is changing, since that version is
        there. `former`: what the last step of a synchronous job has changed."""
        if wanted.number < newest and (former is None or former.number != wanted.number):
            return False
        held = PinnedRows(wanted.number, self._bytes_max)
        for each in [*([] if former is None else [former]), *self._under_way]:
            held.add(each)
        self._held[wanted] = held
        return True

    def find(self, wanted: VersionPin) -> PinnedRows | None:
        return self._held.get(wanted)

    def let_go(self, wanted: VersionPin) -> None:
        """The second time does nothing."""
        held = self._held.pop(wanted, None)
        if held is not None:
            held.lose("its pin has been released, or its lease has run out")

    @property
    def nbytes(self) -> int:
        return sum([held.nbytes for held in self._held.values()])

    def __len__(self) -> int:
        """What is held or set aside."""
        return len(self._held) + len(self._under_way)

    # ---- pushes

    def want_former(self, *, begins: bool) -> bool:
        """Whether what a push is about to change is to be set aside before. `begins`: nothing of it has changed yet."""
        self.come_too_late = not self._held or (self.come_too_late and not begins)
        return not self.come_too_late

    def keep(self, formers: Sequence[PreviousRows]) -> None:
        """What a step is about to change."""
        for held in self._held.values():
            for former in formers:
                held.add(former)

    def keep_under_way(self, formers: Sequence[PreviousRows]) -> None:
        """What the push under way is about to change: also for those who come until it has counted."""
        self._under_way += formers
        self.keep(formers)

    def give_up(self, why: str) -> None:
        """What the push under way is about to change could not be set aside."""
        self.lose(why)
        self.come_too_late = True

    def lose(self, why: str) -> None:
        """No version can be read any more."""
        for held in self._held.values():
            held.lose(why)

    def end_push(self) -> bool:
        """It has counted. Whether readers may have waited for that."""
        waited_for, self.come_too_late, self._under_way = self.come_too_late, False, []
        return waited_for
