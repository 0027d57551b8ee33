"""A job's variables in one worker: registers them, gives them initial values, and follows the map.

Owns: the registration, and the connection to the servers under the newest map. `pushes` builds pushes, `values` loads
versions. Must not know: how a push is named (strategies).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from shardyard.domain import errors
from shardyard.domain.ids import Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.domain.variables import VariableKind
from shardyard.wire import common_messages, layout_messages, methods
from shardyard.wire.table_messages import tables_to_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies, copies_for
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.optimizers.torch_state import VariableState
from shardyard_worker.rows.row_cache import RowCache
from shardyard_worker.rows.row_codec import EncodedRows
from shardyard_worker.session.session import Session
from shardyard_worker.training.grad_hooks import GradHooks
from shardyard_worker.training.loading import ValueLoader
from shardyard_worker.training.pushes import PushBuilder
from shardyard_worker.training.shares import Shares
from shardyard_worker.training.table_binding import TableBinding
from shardyard_worker.training.variables import ServerLink, StepContext, Variable

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")

SLICE_MS = 200
"""How long a server holds a pull before the worker checks what else has changed."""
BEGIN_PAUSE_MS = 100
"""The longest pause between two questions whether the job has begun, which takes a moment."""


class Trainer:
    """One job, one worker. For the thread that trains."""

    def __init__(
        self,
        session: Session,
        variables: Sequence[Variable],
        optimizer: OptimizerSpec,
        model: torch.nn.Module | None = None,
        tables: TableBinding | None = None,
        *,
        context: Callable[[], StepContext],
        state: Mapping[int, VariableState] | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Registers the variables, and waits until the servers have initial values. `tables`: the model's, if it has
        any. `context`: returns the strategy of the job's current mode; it is called from the first step on. `state`:
        what the optimizer begins with if this worker gives the initial values. `shares`: what the worker at each place
        of a replica pushes; None: this worker pushes all. Raises ConfigurationError."""
        self.session = session
        self.optimizer = optimizer
        self.variables = tuple(variables)
        self._tables = tables
        self._shares = shares
        self._place: int | None = None
        """The place in a replica whose share this worker pushes and pulls; None: all."""
        self._loads_parts = session.job_settings.strategy.uses_groups
        """Whether this worker loads what it has of the variables by itself (`replicas.replica`)."""
        reply = self._register(session.check_waiting)
        layout = layout_messages.layout_from_wire(reply.layout)
        session.follow(reply)
        self._layout = layout
        self.partitions_at = [] if shares is None else shares.partitions(layout)
        """Those to which the worker at each place in a replica pushes."""
        self.first_place = next((place for place, each in enumerate(self.partitions_at) if each), 0)
        """That of the first worker that pushes to any."""
        self.accumulates = False
        """Whether the next backward adds to the gradients of this one, before they are pushed."""
        self.accumulates_by_hand = False
        """The same, set by the script (`job.no_sync`)."""
        if tables is not None:
            tables.adopt(layout)
            tables.choose_cache(session)
        copies = self._copies()
        self.link = ServerLink(session, layout, self.variables, tables)
        self.values = ValueLoader(self.link, model, context)
        self.pushes = PushBuilder(self.link, self.values, copies)
        self._map = layout_messages.map_from_wire(reply.map)
        self._connect(copies)
        try:
            self.pushes.follow(reply)
            if reply.initializer:
                self._initialize(state or {})
            self._await_values(state or {})
        except BaseException:
            self.close()
            raise

    def _copies(self) -> DeviceCopies | None:
        with torch._C.DisableTorchFunctionSubclass():  # reads attributes of targets, not their values
            return copies_for(v.target for v in self.variables if v.spec.kind is VariableKind.PARAMETER)

    def _register(self, check: Callable[[], None] | None = None) -> wire.RegisterVariablesReply:
        request = self._registration()
        return self.session.ask(methods.REGISTER_VARIABLES, request, check=check, pause_ms_max=BEGIN_PAUSE_MS)

    def _registration(self) -> wire.RegisterVariablesRequest:
        return wire.RegisterVariablesRequest(
            caller=common_messages.caller_to_wire(self.session.caller),
            variables=[layout_messages.variable_to_wire(variable.spec) for variable in self.variables],
            optimizer=layout_messages.optimizer_to_wire(self.optimizer),
            places=() if self._shares is None else self._shares.places,
            tables=[] if self._tables is None else tables_to_wire(self._tables.settings),
        )

    # ---- the map

    def _connect(self, copies: DeviceCopies | None, old: FlatBuffers | None = None, *, follows: bool = False) -> None:
        """Buffers, servers and gradient hooks under the newest map. `old`: the buffers under the map before.
        `follows`: a request may have been sent before."""
        session, settings, link = self.session, self.session.settings.worker, self.link
        map_ = self._map
        link.buffers = FlatBuffers(
            link.layout,
            map_,
            shareable=settings.same_host == "auto",
            pushes=not session.job_settings.has_replicas and (self._place is not None or self._shares is None),
            slots=settings.window + 1,
            copies=copies,
            own=None if self._place is None else self.partitions_at[self._place],
        )
        if old is not None:
            link.buffers.take_over(old)
        pull_rules = session.job_settings.compression.pull_rules
        link.router = ServerGroup(
            session,
            map_,
            link.buffers,
            coding=str(pull_rules) if pull_rules.compresses else "",
            order=self.values.order,
            follows=follows,
            tables=link.tables is not None,
        )
        encodes = self.pushes.feedback is not None
        # rows follow the payload on the stream, so then no part of it may be sent before its header
        overlaps = settings.exchange == "overlapped" and not encodes and link.tables is None
        local = session.job_settings.updates_in_workers
        self._hooks = GradHooks(
            link.buffers,
            {} if encodes or local else self.values.targets,
            ready=link.router.ready if overlaps else None,
            partial_now=lambda: self.accumulates or self.accumulates_by_hand,
        )

    def follow_map(self) -> None:
        """Connects under the newest map. Filled-in gradients and the current values stay as they are."""
        session, link = self.session, self.link
        reply = self._register()
        self._map = layout_messages.map_from_wire(reply.map)
        log.info("the job's partitions are at generation %d", self._map.generation)
        regime = session.regime
        session.follow(reply)
        if session.regime != regime:
            self.pushes.on_mode_change()
            self.values.on_mode_change()
            if link.tables is not None:
                link.tables.choose_cache(session)
        if self.cache is not None:
            self.cache.clear()  # partitions may have gone back
        current = link.router.current
        self._connect_again(keeps=True)
        link.router.current = current
        self.pushes.follow(reply)

    def _connect_again(self, *, keeps: bool) -> None:
        """`keeps`: filled-in gradients and the current values stay as they are."""
        self._hooks.close()
        self.link.router.close()
        self.values.on_map_change()
        old, copies = self.link.buffers, self._copies()
        with torch._C.DisableTorchFunctionSubclass():
            self._connect(copies, old if keeps else None, follows=True)
        self.pushes.use(copies)
        old.close()

    def use_place(self, place: int | None, variables: Sequence[Variable] | None = None) -> None:
        """From now on this worker pushes, and pulls, the share of that place in a replica; with None, all variables.
        The values are not there until the next pull. `variables`: the shares, if variables are cut."""
        if place == self._place and variables is None:
            return
        self._place, link = place, self.link
        link.variables = self.variables if variables is None else tuple(variables)
        if place is None or self._shares is None:
            link.layout, indices = self._layout, [*range(len(self.variables))]
        else:
            link.layout = self._shares.layout_at(place, self._layout, self.partitions_at[place])
            indices = self._shares.indices_at(place)
        self.values.load_only(indices)
        self.pushes.use_layout(self._copies())
        self._connect_again(keeps=False)

    @property
    def router(self) -> ServerGroup:
        """The servers under the map that this worker follows."""
        return self.link.router

    @property
    def cache(self) -> RowCache | None:
        """Rows that this worker caches for later steps, if any."""
        return None if self._tables is None else self._tables.cache

    @property
    def is_behind(self) -> bool:
        """Whether there is a newer map."""
        return self.link.router.is_behind

    def reach(self, ask: Callable[[ServerGroup], R]) -> R:
        """Runs `ask` under the newest map, and again whenever there is a newer one. For requests that mean the same
        under each map."""
        while True:
            try:
                return ask(self.link.router)
            except MapChanged:
                self.follow_map()

    def rebase(self, next_sequence: int) -> str:
        """Makes the partitions continue with this worker's own source at that sequence (rule A11). Returns a
        description of the pushes that they lacked before it; empty if none."""
        caller = common_messages.caller_to_wire(self.session.caller)
        reply = self.session.ask(methods.REBASE_SOURCE, wire.RebaseSourceRequest(caller=caller, next=next_sequence))
        return "; ".join(f"#{each.first} to #{each.last} in partition {each.partition}" for each in reply.lost)

    def close(self) -> None:
        if self._tables is not None:
            self._tables.end()
        self.pushes.close()
        self.values.close()
        self._hooks.close()
        self.link.router.detach()
        self.link.router.close()
        self.link.buffers.close()

    # ---- pulls

    def pull_newest(self) -> ExchangeResult:
        """Puts the newest version of each partition into the targets. For an asynchronous job."""
        self.link.router.abandon_pull()
        answer = self.reach(lambda router: router.pull(PullSpec(0, exactly=False)))
        if answer.missing:
            raise errors.NotReady(f"version 0 of an open job is not there: {explain(answer)}")
        self.values.load()
        return answer

    def pull_step(self, at_least: int, *, unless: Callable[[], bool] = lambda: False) -> int | None:
        """Waits for version `at_least`, and puts it or a later one into the targets, the same of all partitions, while
        other workers continue with the steps of a synchronous job. Returns its number. `unless` is called regularly;
        once it returns True, returns None."""
        number, answer = at_least, ExchangeResult()
        with self.session.wait_registry.over(lambda: f"version {number}: {explain(answer)}"):
            self.link.router.abandon_pull()
            while True:
                try:
                    pull = PullSpec(number, exactly=True, wait_ms=SLICE_MS)
                    answer = self.reach(partial(ServerGroup.pull, pull=pull))
                except errors.NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    number = max(number + 1, int(error.facts["newest"]))
                    self.link.router.abandon_pull()
                    continue
                if not answer.missing:
                    break
                self.session.check_waiting()
                if unless():
                    self.link.router.abandon_pull()
                    return None
        self.values.load()
        return number

    def await_version(self, number: int) -> None:
        """Waits until all partitions have that version or a later one. Brings no values. Raises MapChanged."""
        answer = ExchangeResult()
        with self.session.wait_registry.over(lambda: f"version {number}: {explain(answer)}"):
            while True:
                pull = PullSpec(number, exactly=False, wait_ms=SLICE_MS, values=False)
                answer = self.link.router.pull_rows(pull, None)
                if not answer.missing:
                    return
                self.session.check_waiting()

    # ---- first values

    def _initialize(self, state: Mapping[int, VariableState]) -> None:
        caller = self.session.caller
        while True:
            self.reach(partial(self._give_values, state))
            generation = self.link.router.generation
            request = wire.CommitVariablesRequest(caller=common_messages.caller_to_wire(caller), generation=generation)
            try:
                self.session.ask(methods.COMMIT_VARIABLES, request, pause_ms_max=BEGIN_PAUSE_MS)
            except errors.StaleGeneration as error:
                log.info("the servers are given first values again (%s)", error.what)
                self.follow_map()
            else:
                log.info("gave the servers their first values")
                return

    def _give_values(self, state: Mapping[int, VariableState], router: ServerGroup) -> None:
        name = PushName(SourceKey(WorkerSource(self.session.caller.incarnation)), Token(0), 0, 0)
        router.initialize(name, [variable.target for variable in self.variables])
        if state:
            router.optimizer.give(state)
        for table in () if self.link.tables is None else self.link.tables.first_rows():
            for piece in table.cut():
                router.initialize_rows(name, EncodedRows([piece]))

    def _await_values(self, state: Mapping[int, VariableState]) -> None:
        """Waits until the servers have initial values. Another worker gives them, or this one if that worker dies."""
        answer = ExchangeResult()
        with self.session.wait_registry.over(lambda: f"first values: {explain(answer)}"):
            while True:
                pull = PullSpec(0, exactly=False, wait_ms=SLICE_MS, values=not self._loads_parts)
                answer = self.reach(partial(ServerGroup.pull, pull=pull))
                if not answer.missing:
                    return
                self.session.check_waiting()
                if self.session.initializer:
                    self._initialize(state)


def explain(answer: ExchangeResult) -> str:
    """Describes what an unfinished pull waits for; the same wait of several partitions once."""
    waits: dict[tuple[int, str], list[int]] = {}
    for item in answer.missing:
        waits.setdefault((item.have.number, item.waiting_for), []).append(item.partition)
    return "; ".join(
        f"partition {', '.join(map(str, sorted(partitions)[:8]))} at version {number} waits for {what}"
        for (number, what), partitions in list(waits.items())[:4]
    )
