"""Joins a job: `sy.connect()`, once the settings are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

from shardyard.config.settings import Settings
from shardyard.domain.errors import RunFinished, ShardyardError
from shardyard.domain.ids import Incarnation, MemberRole
from shardyard.runtime.malloc import Kept, tune_malloc
from shardyard.security.identity import Role
from shardyard.transport.enrolment import own_credentials
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Network
from shardyard.transport.membership_client import Membership
from shardyard_worker.data.seeding import seed_everything
from shardyard_worker.job.job import Job
from shardyard_worker.session.departure import Departure
from shardyard_worker.session.devices import pick_device
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.session.metrics import MetricLog
from shardyard_worker.session.run_name import end_run, run_of
from shardyard_worker.session.session import Session
from shardyard_worker.session.tensorboard import TensorBoardWriter, open_writer

log = logging.getLogger("shardyard.worker")


def connect(
    settings: Settings,
    *,
    network: Network | None = None,
    on_close: Callable[[], None] | None = None,
    owns_process: bool = False,
) -> Job:
    """Joins the settings' job in the yard at `settings.coordinator`. Starts it if there is none of that name.

    `network`: how to reach the yard; gRPC by default. `on_close` is called after this worker has left the job; it is
    given where the yard is in this process and ends with the job.
    `owns_process`: SIGTERM lets the worker leave in order, and the process ends if that takes too long. Raises
    CoordinatorUnavailable, ConfigurationError, JobFailed. Raises SystemExit(0) if this process was started again after
    the run of its launch was finished.
    """
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    membership = _membership(os.environ)
    metrics = MetricLog()
    run = run_of(os.environ)
    if network is None:
        network = GrpcNetwork(own_credentials(settings, Role.WORKER))
    session = Session(network, settings.coordinator, settings, membership, metrics.take, run=run)
    session.is_alone = on_close is not None
    files: TensorBoardWriter | None = None
    try:
        with INTERRUPTS:
            device = pick_device(settings.worker.device, membership.local_index)
            session.join()
            # a job whose variables are spread is one whose model is too large
            tune_malloc(Kept.LITTLE if session.job_settings.strategy.is_spread else Kept.TENSORS)
            who = f"worker-{session.caller.incarnation}"
            files = open_writer(settings.metrics.tensorboard, job=settings.job.name, who=who)
    except BaseException as error:
        if files is not None:
            files.close()
        session.leave("could not join", lost=isinstance(error, ShardyardError) and error.new_process_helps)
        if on_close is not None:
            on_close()
        if isinstance(error, RunFinished):
            log.info("%s: nothing is left to do, and this process ends", error.what)
            raise SystemExit(0) from None
        raise
    seed_everything(session.seed)
    departure = Departure(session) if owns_process else None

    def close() -> None:
        if departure is not None:
            departure.close()
        if not session.has_lost_the_yard:  # another connect of this process would go on with the same run
            end_run(os.environ)
        if on_close is not None:
            on_close()

    return Job(session, device, metrics, files, close)


def _membership(environment: Mapping[str, str]) -> Membership:
    """The agent that started this process, and the process's index on its machine, as the agent wrote them."""
    agent, index = environment.get("SHARDYARD_AGENT", ""), environment.get("SHARDYARD_LOCAL_INDEX", "0")
    return Membership(
        MemberRole.WORKER,
        agent=Incarnation(int(agent)) if agent.isdigit() else None,
        local_index=int(index) if index.isdigit() else 0,
    )
