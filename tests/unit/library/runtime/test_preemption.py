"""Notices of preemption: which answers and files are one, and that nothing else can do harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardyard.config import configuration
from shardyard.domain.errors import ConfigurationError
from shardyard.runtime import preemption
from shardyard.runtime.preemption import PreemptionNotice, PreemptionWatch
from tests.support.waiting import wait_until

Answer = Callable[[BaseHTTPRequestHandler], None]


class Metadata:
    """A metadata server. `answer` sends the answer to each request."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: send(request, 404)
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                outer.answer(self)

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    served = Metadata()
    yield served
    served.close()


def test_file_is_a_notice_once_it_exists(tmp_path: Path) -> None:
    notice = PreemptionNotice(str(tmp_path / "notice"))
    assert not notice.is_given()
    (tmp_path / "notice").touch()
    assert notice.is_given()


@pytest.mark.parametrize(
    ("status", "body", "given"),
    [
        (200, b'{"action": "terminate"}', True),
        (200, b"TRUE", True),
        (200, b"FALSE\n", False),
        (200, b"NONE", False),
        (200, b"", False),
        (204, b"", False),
        (404, b"not found", False),
        (500, b"broken", False),
    ],
)
def test_answer_with_a_body_is_a_notice(metadata: Metadata, status: int, body: bytes, given: bool) -> None:
    metadata.answer = lambda request: send(request, status, body)
    assert PreemptionNotice(metadata.url).is_given() is given


def test_redirect_is_not_followed(metadata: Metadata) -> None:
    metadata.answer = lambda request: send(request, 302, b"moved", Location=f"{metadata.url}/other")
    assert not PreemptionNotice(metadata.url + "/notice").is_given()
    assert metadata.asked == ["GET /notice"]


def test_no_more_than_the_bound_is_read_of_an_answer_without_end(metadata: Metadata) -> None:
    ended = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while not ended.is_set():
                request.wfile.write(b"x" * 1_000)
        except OSError:
            ended.set()

    metadata.answer = answer
    assert PreemptionNotice(metadata.url).is_given()
    wait_until(ended.is_set)


def test_server_that_does_not_answer_is_no_notice(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "TIMEOUT_S", 0.05)
    go_on = threading.Event()
    metadata.answer = lambda request: (go_on.wait(10), send(request, 200, b"late"))[1]
    begun = time.monotonic()
    assert not PreemptionNotice(metadata.url).is_given()
    assert time.monotonic() - begun < 5
    go_on.set()
    assert not PreemptionNotice("http://127.0.0.1:1/").is_given()


def test_proxy_of_the_environment_is_not_used(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    metadata.answer = lambda request: send(request, 200, b"TRUE")
    assert PreemptionNotice(metadata.url).is_given()


def test_headers_are_those_that_clouds_want(metadata: Metadata) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.command == "PUT":
            assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            send(request, 200, b"secret")
        elif request.headers["X-aws-ec2-metadata-token"] != "secret":
            send(request, 401)
        else:
            assert request.headers["Metadata-Flavor"] == "Google"
            send(request, 200, b"TRUE")

    metadata.answer = answer
    notice = PreemptionNotice(metadata.url + "/notice")
    assert not notice.is_given()
    assert notice.is_given()
    assert metadata.asked == ["GET /notice", "PUT /latest/api/token", "GET /notice"]


def test_watch_tells_once_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    told: list[str] = []
    notice = tmp_path / "notice"
    with PreemptionWatch(str(notice), told.append):
        assert told == []
        notice.touch()
        wait_until(lambda: bool(told))
    assert told == [f"a preemption notice at {notice}"]
    with PreemptionWatch(str(tmp_path / "never"), told.append), PreemptionWatch(None, told.append):
        pass
    assert len(told) == 1
    assert "preemption" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("place", ["relative/path", "ftp://host/file", "http://", "file:///notice", "/"])
def test_other_places_are_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match="never, an absolute path"):
        configuration.load(None, {}, {"membership.preemption_notice": place})
