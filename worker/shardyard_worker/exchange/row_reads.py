"""Reads of table rows from the servers, by calls of their own. They do not wait for the worker's exchanges.

A look-up of the thread that trains is an exchange if the job allows it (`ServerGroup.looks_up_in_exchanges`).

Owns: the three reads: rows by id, the number of rows, all rows of a partition. Invariant: a read changes nothing, so it
is repeated if no answer came. Must not know: what the rows are for, caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.pulls import LookupRequest
from shardyard.wire import common_messages, methods
from shardyard.wire import table_messages as tables
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.fan_out import FanOut
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.row_codec import RowLookup
from shardyard_worker.session.session import Session

ROWS_WAIT_MS = 200
"""How long a server holds a look-up until its version is there."""


class RowReads:
    """Reads under one partition map. Any thread may read, even while another thread exchanges."""

    def __init__(
        self,
        session: Session,
        map_: PartitionMap,
        owned: Mapping[Incarnation, tuple[PartitionId, ...]],
        fan_out: FanOut,
        streams: Mapping[Incarnation, ServerStream],
    ) -> None:
        self._session = session
        self._fan_out = fan_out
        self._streams = streams
        self._generation = map_.generation
        self._deadline_ms = session.settings.worker.rpc_deadline_ms
        self.owned = owned
        """The partitions of each server."""

    def look_up(
        self, asked: Mapping[Incarnation, Sequence[RowLookup]], into: Sequence[Float32s], number: int | None = None
    ) -> None:
        """Asks all servers at once, and puts the rows into the arrays of the look-ups. `number`: the version of the
        rows in a synchronous job; None: the newest of each partition. Raises NotFound (facts: newest) if the version
        has passed."""
        code = self._session.job_settings.compression.rows_pull
        wait_ms = 0 if number is None else ROWS_WAIT_MS

        def ask(stream: ServerStream) -> None:
            for lookup in asked[stream.server]:
                request = LookupRequest(
                    self._session.caller, stream.server, self._generation, lookup.requested, number, wait_ms, code
                )
                frame = Frame(tables.look_up_to_header(request), 0, b"".join(lookup.ids))
                answer = stream.peer.call(methods.LOOK_UP, frame, timeout_ms=self._deadline_ms)
                lookup.put(memoryview(answer.data), into, code)

        streams = [self._streams[server] for server, lookups in asked.items() if lookups]
        self._fan_out.call(ask, "rows that are looked up", streams)

    def count_rows(self, table: str) -> int:
        """How many rows the servers have of a table of this job."""

        def ask(stream: ServerStream) -> int:
            reply = stream.peer.call(
                methods.DESCRIBE_SERVER, wire.DescribeServerRequest(), timeout_ms=self._deadline_ms
            )
            job = self._session.caller.job
            return sum([each.rows for each in reply.tables if each.job == job and each.name == table])

        return sum(self._fan_out.call(ask, f"the number of rows of table {table!r}"))

    def read_rows(self, table: int, dim: int, partition: PartitionId) -> list[tuple[Int64s, Float32s]]:
        """All rows of a table in a partition, in pieces of ids, shape (n,), and rows, shape (n, dim)."""

        def ask(stream: ServerStream) -> list[tuple[Int64s, Float32s]]:
            request = wire.ReadRowsRequest(
                caller=common_messages.caller_to_wire(self._session.caller),
                server=stream.server,
                generation=self._generation,
                partition=partition,
                table=table,
            )
            found = stream.peer.receive(methods.READ_ROWS, request, timeout_ms=self._deadline_ms)
            return tables.rows_from_frames(found, dim, f"server {stream.server}")

        owner = next(server for server, owned in self.owned.items() if partition in owned)
        what = f"all rows of table {table} in partition {partition}"
        return self._fan_out.call(ask, what, [self._streams[owner]])[0]
