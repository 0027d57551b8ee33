"""Log lines and the waits that they explain."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import threading
from collections.abc import Iterator

import pytest

from shardyard.domain import limits
from shardyard.runtime import log
from shardyard.runtime.waits import ExplainedWait

logger = logging.getLogger("shardyard.test")


@pytest.fixture(autouse=True)
def _clean_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    # a session that an earlier test had in this process bound a job and a step, which would end each line
    log.PROCESS.clear()
    with log.context():
        yield
    log.PROCESS.clear()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]


def in_thread(action) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


# --- formats


def test_json_line_has_time_level_logger_message_context_and_extra(stream: io.StringIO) -> None:
    log.setup("json", "info", stream)
    log.bind_process(role="worker", id=2)
    with log.context(job="ads", step=17):
        logger.warning("pushed %d parts", 3, extra={"bytes": 64})
    (line,) = json_lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        "level": "warning",
        "logger": "shardyard.test",
        "message": "pushed 3 parts",
        "role": "worker",
        "id": 2,
        "job": "ads",
        "step": 17,
        "bytes": 64,
    }


def test_json_time_is_utc(stream: io.StringIO) -> None:
    record = logging.makeLogRecord({"msg": "x", "created": 1_000_000_000.25})
    assert json.loads(log.JsonFormatter().format(record))["time"] == "2001-09-09T01:46:40.250Z"


def test_json_stays_valid_whatever_is_logged() -> None:
    endless: list[object] = []
    endless.append(endless)
    extra = {"loss": float("nan"), "top": [float("inf"), {1: {2}}], "endless": endless, "level": "mine"}
    # not by a logger: what pytest keeps of it could not be sent to another process
    record = logging.makeLogRecord({"msg": "two\nlines \udcff", "levelname": "INFO", **extra})
    line = json.loads(log.JsonFormatter().format(record))
    assert line["message"] == "two\nlines \udcff"
    assert line["loss"] == "nan"
    assert line["top"] == ["inf", {"1": "{2}"}]
    assert (line["level"], line["level_"]) == ("info", "mine")


def test_json_carries_the_traceback_on_one_line(stream: io.StringIO) -> None:
    log.setup("json", "info", stream)
    try:
        raise KeyError("block 3")
    except KeyError:
        logger.exception("failed")
    (line,) = json_lines(stream)
    assert "Traceback" in str(line["exception"])
    assert "KeyError: 'block 3'" in str(line["exception"])


def test_human_line_says_when_how_bad_who_what(stream: io.StringIO) -> None:
    log.setup("human", "info", stream)
    log.bind_process(role="server", id=3)
    logger.warning("slow", extra={"step": 17, "text": "two words", "none": ""})
    line = stream.getvalue()
    assert re.fullmatch(r'\d\d:\d\d:\d\d\.\d{3} WARNING server#3 slow step=17 text="two words" none=""\n', line), line


def test_human_line_without_a_role_names_the_logger(stream: io.StringIO) -> None:
    log.setup("auto", "info", stream)
    logger.info("hello")
    assert stream.getvalue().endswith(" INFO    shardyard.test hello\n")


def test_human_traceback_follows_its_line(stream: io.StringIO) -> None:
    log.setup("human", "info", stream)
    try:
        raise KeyError("block 3")
    except KeyError:
        logger.exception("failed")
    first, second, *_, last = stream.getvalue().splitlines()
    assert first.endswith("failed")
    assert second.startswith("Traceback")
    assert last == "KeyError: 'block 3'"


# --- setting up


def test_level_is_a_floor(stream: io.StringIO) -> None:
    log.setup("json", "warning", stream)
    logger.info("quiet")
    logger.warning("loud")
    assert [line["message"] for line in json_lines(stream)] == ["loud"]


def test_setting_up_again_replaces_our_handler_and_no_other(stream: io.StringIO) -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first = log.setup("human", "info", io.StringIO())
    second = log.setup("json", "info", stream)
    assert first not in logging.getLogger().handlers
    assert {other, second} <= set(logging.getLogger().handlers)
    logger.info("once")
    assert len(json_lines(stream)) == 1


def test_default_stream_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("human", "info")
    logger.info("hello")
    out, err = capsys.readouterr()
    assert out == ""
    assert "hello" in err


@pytest.mark.parametrize(("chosen", "level"), [("xml", "info"), ("json", "loud")])
def test_unknown_format_or_level_is_refused(chosen: str, level: str) -> None:
    with pytest.raises(ValueError, match="expected a log"):
        log.setup(chosen, level)


def test_chatty_libraries_stay_quiet_at_debug(stream: io.StringIO) -> None:
    log.setup("json", "debug", stream)
    logging.getLogger("numba.core").debug("bytecode")
    logger.debug("ours")
    assert [line["message"] for line in json_lines(stream)] == ["ours"]


# --- fields


def test_context_ends_with_its_block_even_by_an_error() -> None:
    with log.context(job="a"):
        with contextlib.suppress(RuntimeError), log.context(job="b", step=1):
            assert log.current_fields() == {"job": "b", "step": 1}
            raise RuntimeError
        assert log.current_fields() == {"job": "a"}
    assert log.current_fields() == {}


def test_bound_fields_stay_in_their_thread() -> None:
    seen: list[dict[str, object]] = []

    def work() -> None:
        log.bind(step=1)
        seen.append(log.current_fields())

    in_thread(work)
    log.bind(step=2)
    assert seen == [{"step": 1}]
    assert log.current_fields() == {"step": 2}


def test_threads_see_the_fields_of_the_process_also_those_bound_later() -> None:
    seen: list[dict[str, object]] = []
    bound = threading.Event()

    def work() -> None:
        assert bound.wait(10)
        seen.append(log.current_fields())

    thread = threading.Thread(target=work)
    with log.context(request="r1"):
        thread.start()
    log.bind_process(role="server", id=3)
    bound.set()
    thread.join(10)
    in_thread(lambda: seen.append(log.current_fields()))
    assert seen == [{"role": "server", "id": 3}] * 2


def test_context_wins_over_process_and_none_takes_away() -> None:
    log.bind_process(role="worker", id=1, job="a")
    with log.context(id=2, job=None):
        assert log.current_fields() == {"role": "worker", "id": 2}
    log.bind_process(id=None)
    assert log.current_fields() == {"role": "worker", "job": "a"}


# --- waits


class Waiting:
    """A wait on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.step = 17
        self.wait = ExplainedWait(
            lambda: f"server 3 to apply step {self.step}", clock_ms=lambda: self.now_ms, logger=logger
        )

    def tick_at(self, waited_ms: int) -> int:
        self.now_ms = 1_000 + waited_ms
        return self.wait.tick()


@pytest.fixture
def waiting(caplog: pytest.LogCaptureFixture) -> Waiting:
    caplog.set_level(logging.INFO, logger.name)
    return Waiting()


def test_short_wait_says_nothing(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    with waiting.wait:
        assert waiting.tick_at(0) == limits.EXPLAIN_WAIT_MS
        assert waiting.tick_at(limits.EXPLAIN_WAIT_MS - 1) == 1
    assert caplog.messages == []


def test_long_wait_says_every_five_seconds_what_it_waits_for(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    with waiting.wait:
        assert waiting.tick_at(5_000) == 5_000
        waiting.tick_at(9_999)
        waiting.step = 18
        waiting.tick_at(10_000)
        waiting.tick_at(12_340)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "waiting for server 3 to apply step 17, for 5.0 s so far"),
        ("WARNING", "waiting for server 3 to apply step 18, for 10.0 s so far"),
        ("INFO", "the wait is over after 12.3 s"),
    ]


def test_late_tick_warns_once(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    with waiting.wait:
        assert waiting.tick_at(23_000) == 5_000
        waiting.tick_at(23_001)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_wait_given_up_names_the_error(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.suppress(TimeoutError), waiting.wait:
        waiting.tick_at(6_000)
        raise TimeoutError
    assert caplog.messages[-1] == "the wait was given up (TimeoutError) after 6.0 s"


def test_description_is_there_while_waiting_only(waiting: Waiting) -> None:
    assert waiting.wait.description is None
    with waiting.wait as wait:
        waiting.now_ms += 700
        assert (wait.description, wait.waited_ms) == ("server 3 to apply step 17", 700)
    assert (waiting.wait.description, waiting.wait.waited_ms) == (None, 0)


def test_wait_can_be_used_again(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    with waiting.wait:
        waiting.tick_at(6_000)
    with waiting.wait:
        waiting.now_ms += 4_999
        waiting.wait.tick()
    assert len(caplog.messages) == 2
