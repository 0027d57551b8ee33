"""The best version of a job that an evaluator has found: a file with its values, and a manifest that names it.

    <URL>/<job>/best/step-000000001350-5f0c9a77d2e14b60.safetensors   variables by name, parameters and buffers
    <URL>/<job>/best/manifest.json                                    {"best":{...},"sha256":"..."}, written last

Owns: that folder. Invariant: the manifest is written after the file that it names, and a digest covers every bit of it.
So if the writer dies, at any moment, either the former best or the new one is there. The former file is deleted last.
Only one evaluator at a time may keep the best of a job at a URL. Any process may read it. Must not know: how a version
is judged, checkpoints.
"""

from __future__ import annotations

import datetime
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from shardyard.checkpoints.manifest import check_job_name
from shardyard.domain import limits
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest
from shardyard.domain.ids import JobId
from shardyard.storage import tensors
from shardyard.storage.json_reader import seal, unseal
from shardyard.storage.storage import Buffer, Storage, Written
from shardyard.storage.tensors import Array, Contents, Tensor, TensorSource

FOLDER: Final = "best"
NAME: Final = "manifest.json"
FORMAT: Final = "shardyard-best"
FORMAT_VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = limits.MIB

_FILE: Final = re.compile(r"step-[0-9]{12,19}-[0-9a-f]{16}\.safetensors")
_TEXT: Final = re.compile(rf"[^\x00-\x1f]{{1,{limits.METRIC_NAME_CHARACTERS_MAX}}}")
_MODE: Final = re.compile("max|min")
_NAMES: Final = ("format", "version", "job", "metric", "mode", "value", "step", "created", "path", "nbytes", "sha256")


@dataclass(frozen=True, slots=True)
class BestManifest:
    """`job`: the run that the version belongs to. `mode`: "max" if a larger value is better, "min" if a smaller one is.
    `created`: ISO 8601 with a time zone. `path`: of the values, from the folder."""

    job: JobId
    metric: str
    mode: str
    value: float
    step: int
    created: str
    path: str
    written: Written

    def is_beaten_by(self, value: float) -> bool:
        """Whether `value` is better. NaN is not better than any value."""
        return value > self.value if self.mode == "max" else value < self.value


class BestFolder:
    """The folder of one job. All methods raise StorageUnavailable. Raises InvalidRequest for an impossible name."""

    def __init__(self, storage: Storage, job: str) -> None:
        self.storage = storage
        self._folder = f"{check_job_name(job)}/{FOLDER}"

    @property
    def url(self) -> str:
        return self.storage.locate(self._folder)

    # ---- reading

    def load(self) -> BestManifest | None:
        """The manifest; None: there is no best version yet. Raises CheckpointDamaged if the manifest has changed, or if
        the file that it names does not exist or has another length."""
        path = f"{self._folder}/{NAME}"
        where = self.storage.locate(path)
        try:
            text = self.storage.read_whole(path, MANIFEST_BYTES_MAX)
        except CheckpointNotFound:
            return None
        found = decode(text, where)
        try:
            size = self.storage.size(f"{self._folder}/{found.path}")
        except CheckpointNotFound as error:
            raise CheckpointDamaged(f"{error.what}, and {where} names it") from error
        if size != found.written.nbytes:
            raise CheckpointDamaged(
                f"{self.storage.locate(self._folder)}/{found.path} has {size} bytes; expected {found.written.nbytes}"
            )
        return found

    def contents(self, best: BestManifest) -> Contents:
        """Names, dtypes and shapes of the values. Raises CheckpointDamaged, CheckpointNotFound."""
        return tensors.read_contents(self.storage, f"{self._folder}/{best.path}")

    def read(self, best: BestManifest) -> dict[str, Array]:
        """The values by name, read-only. The digest of the whole file is checked. Raises CheckpointDamaged,
        CheckpointNotFound."""
        path = f"{self._folder}/{best.path}"
        _, found = tensors.read_file(self.storage, path, best.written, lambda _: True)
        return found

    def check(self, best: BestManifest) -> Contents:
        """Checks the digest of the whole file, piece by piece, and returns names, dtypes and shapes. Raises
        CheckpointDamaged, CheckpointNotFound."""
        contents, _ = tensors.read_file(self.storage, f"{self._folder}/{best.path}", best.written, lambda _: False)
        return contents

    def sources(self, best: BestManifest, contents: Contents) -> list[TensorSource]:
        """The values, to be written into another file; each is read piece by piece when its turn comes. `contents`:
        what `check` returned. The digest is not checked again."""
        path = f"{self._folder}/{best.path}"
        return [
            TensorSource(each.name, each.dtype, each.shape, stream=partial(self._pieces, path, each))
            for each in contents.tensors.values()
        ]

    def _pieces(self, path: str, tensor: Tensor) -> Iterator[Buffer]:
        return self.storage.read_pieces(path, tensor.begin, tensor.end)

    def stream(self, best: BestManifest, contents: Contents) -> Iterator[tuple[str, Array]]:
        """Yields the values by name, read-only, one at a time. `contents`: as in `sources`."""
        path = f"{self._folder}/{best.path}"
        for each in contents.tensors.values():
            yield each.name, tensors.read_tensor(self.storage, path, each)

    # ---- writing

    def keep(
        self,
        *,
        job: JobId,
        metric: str,
        mode: str,
        value: float,
        step: int,
        values: Mapping[str, Array],
        more: Sequence[TensorSource] = (),
    ) -> None:
        """Writes this version as the best one, and deletes the former. `more`: values that are fetched while the file
        is written. Raises InvalidRequest, TooLarge."""
        if not math.isfinite(value) or not _TEXT.fullmatch(metric) or not _MODE.fullmatch(mode):
            raise InvalidRequest(f"cannot keep the {mode} of {metric[:100]!r}, which is {value}")
        path = f"step-{step:012d}-{secrets.token_hex(8)}.safetensors"
        text = {"step": str(step), "metric": metric, "value": repr(value)}
        pieces = tensors.pieces(text, [*(tensors.source_of(name, array) for name, array in values.items()), *more])
        written = self.storage.write(f"{self._folder}/{path}", pieces)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kept = BestManifest(job, metric, mode, value, step, created, path, written)
        self.storage.write(f"{self._folder}/{NAME}", [encode(kept)])
        for name in self._others(path):  # the former best, and files that were never finished
            self.storage.delete_file(f"{self._folder}/{name}")

    def _others(self, path: str) -> Iterator[str]:
        return (name for name in self.storage.list_files(self._folder) if name != path and _FILE.fullmatch(name))


def encode(best: BestManifest) -> bytes:
    return seal(
        "best",
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "job": int(best.job),
            "metric": best.metric,
            "mode": best.mode,
            "value": float(best.value),
            "step": best.step,
            "created": best.created,
            "path": best.path,
            "nbytes": best.written.nbytes,
            "sha256": best.written.sha256,
        },
    )


def decode(text: bytes, where: str) -> BestManifest:
    """Raises CheckpointDamaged."""
    node = unseal(text, "best", where).read()
    found = node.fields(_NAMES)
    if (found["format"].value, found["version"].value) != (FORMAT, FORMAT_VERSION):
        raise CheckpointDamaged(f"{where} has a format that this release does not know")
    return BestManifest(
        job=JobId(found["job"].number((1 << 64) - 1)),
        metric=found["metric"].text(_TEXT, "a metric's name"),
        mode=found["mode"].text(_MODE, "max or min"),
        value=found["value"].real(),
        step=found["step"].number(),
        created=found["created"].time(),
        path=found["path"].text(_FILE, "the name of a file of values"),
        written=node.written(limits.JOB_BYTES_MAX),
    )
