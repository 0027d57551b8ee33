"""Which URLs a coordinator and its servers read and write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardyard.domain.errors import ConfigurationError
from shardyard.domain.ids import Caller
from shardyard.storage.access import StorageAccess
from shardyard.storage.storage import SCHEMES, open_storage
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders
from tests.support.exchanges import GENERATION, HERE, JOB, server


@pytest.mark.parametrize(
    "url",
    [
        "reference://::data:application/json,{}",
        "simplecache::s3://bucket/path",
        "file::/tmp",
        "http://127.0.0.1:1/",
        "https://example.org/models",
        "zip://a.zip",
        "github://owner:name@main/",
        "S3://bucket/path",
        "://path",
        "dask::s3://bucket",
    ],
)
def test_urls_that_run_code_or_reach_elsewhere_are_opened_nowhere(url: str) -> None:
    for opens in (open_storage, StorageAccess().check, StorageAccess().open):
        with pytest.raises(ConfigurationError, match=r"is not a URL for checkpoints"):
            opens(url)
    with pytest.raises(ConfigurationError):
        StorageAccess(url)


def test_the_guide_lists_the_kinds_of_url_that_are_opened() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/guides/security.md").read_text()
    (listed,) = [part for part in page.split("\n\n") if part.startswith("With or without it")]
    before_fsspec = listed.partition("fsspec")[0]
    assert set(re.findall(r"`(\w+)`", before_fsspec)) == SCHEMES


def test_without_roots_folders_and_known_stores_are_allowed(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", "memory://m", "s3://bucket/path", "gs://bucket"):
        StorageAccess().check(url)


def test_with_roots_only_what_lies_below_them_is_allowed(tmp_path: Path) -> None:
    access = StorageAccess(f"{tmp_path}/a s3://bucket/models memory://m", tmp_path / "own")
    below = ("a", "a/b", "a/../a/b", "own", "own/job")
    for url in (
        *[f"{tmp_path}/{each}" for each in below],
        *[f"file://{tmp_path}/{each}" for each in below],
        "s3://bucket/models",
        "s3://bucket/models/",
        "s3://bucket//models/ranking",
        "memory://m/x",
    ):
        access.check(url)
    for url in (
        str(tmp_path),
        f"{tmp_path}/ab",
        f"{tmp_path}/a/../b",
        f"file://{tmp_path}/a/%2e%2e/b",
        "s3://bucket",
        "s3://bucket/models-of-others",
        "s3://other/models",
        "s3a://bucket/models",
        "gs://bucket/models",
        "memory://n",
        ".",
    ):
        with pytest.raises(ConfigurationError, match=r"not below storage\.allowed"):
            access.check(url)
    for url in ("s3://bucket/models/../secrets", "s3://bucket/models/%2e%2e/secrets"):
        with pytest.raises(ConfigurationError, match="has the part"):
            access.check(url)


def test_a_symbolic_link_out_of_a_root_is_not_below_it(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    access = StorageAccess(str(tmp_path / "root"))
    with pytest.raises(ConfigurationError, match="not below"):
        access.check(f"{tmp_path}/root/link/elsewhere")


def test_a_server_writes_a_checkpoint_only_below_its_roots(tmp_path: Path) -> None:
    store = server()
    store.access = StorageAccess(str(tmp_path / "root"))
    ask = SaveRequest(1, None, 0, 0)
    with pytest.raises(ConfigurationError, match=r"not below storage\.allowed"):
        orders.save(store, Caller(JOB), HERE, GENERATION, ask, str(tmp_path / "elsewhere"))
    assert not list(tmp_path.iterdir())
    orders.save(store, Caller(JOB), HERE, GENERATION, ask, str(tmp_path / "root"))
    assert list((tmp_path / "root").rglob("*"))
