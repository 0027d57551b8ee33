"""In a yard with a key, everything below the place of checkpoints is encrypted, and is restored."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import torch

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.config import configuration
from shardyard.security.identity import Role
from shardyard.security.signatures import keys_of
from shardyard.storage.encryption import MAGIC, EncryptedStorage, StorageKeys
from shardyard.storage.storage import LocalStorage
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.job import connect as worker
from tests.support.identities import Identities, coordinator_at


def test_what_a_yard_writes_is_encrypted_and_is_restored(tmp_path: Path) -> None:
    key, kept = tmp_path / "key", tmp_path / "kept"
    key.write_text("5f" * 32)
    given = {
        "yard.servers": 1,
        "yard.workers": 1,
        "yard.coordinator_port": 0,
        "storage.key_file": str(key),
        "job.checkpoint.url": str(kept),
        "job.name": "ranking",
        "log.level": "error",
    }
    cluster = LocalCluster(configuration.load(None, {}, given).settings, tmp_path / "state", tied=True)
    cluster.start(stop=threading.Event())
    try:
        settings = configuration.load(None, {}, given | {"coordinator": cluster.coordinator}).settings
        job = worker.connect(settings)
        job.register({"w": torch.arange(20.0)}, lr=0.5)
        job.push({"w": torch.arange(20.0)})
        number = job.checkpoint()
        with contextlib.closing(coordinator_at(cluster.coordinator)) as coordinator:
            request = wire.RestoreCheckpointRequest(job_name="ranking", number=number)
            reply = coordinator.call(methods.RESTORE_CHECKPOINT, request, timeout_ms=60_000)
        assert (reply.number, reply.running) == (number, True)
        job.close()
    finally:
        cluster.stop()
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert {path.name.partition("-")[0] for path in files} == {"partition", "manifest.json"}
    assert all(path.read_bytes().startswith(MAGIC) for path in files)
    pem = Identities(tmp_path / "state" / "identity").of(Role.OPERATOR).pem
    library = CheckpointLibrary(EncryptedStorage(LocalStorage(kept), StorageKeys(key)), keys_of(pem))
    assert library.verify("ranking") == ()
    values = dict(library.export_state(library.load("ranking", number)))
    assert np.array_equal(values["w"], 0.5 * np.arange(20))
