"""Settings from four layers: who wins, what is refused, and in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import shardyard as sy
from shardyard.config.configuration import (
    PROCESS_VARIABLES,
    SHORT_NAMES,
    Flag,
    environment_name,
    load,
    parse_job_settings,
    parse_set,
    render_explanation,
    written,
)
from shardyard.config.settings import JobSettings, Settings, catalogue
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode, StaleRule
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.replica_groups import Strategy

ROOT = Path(__file__).parents[4]
KNOWN = catalogue()


@pytest.fixture
def write(tmp_path: Path):
    def _write(content: str | bytes) -> Path:
        file = tmp_path / "yard.yaml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return _write


def test_arguments_of_connect_are_not_called_flags() -> None:
    with pytest.raises(ConfigurationError, match=r"\n  the argument settings: job\.sede: unknown setting"):
        sy.connect(settings={"job.sede": 3})
    with pytest.raises(ConfigurationError, match=r"\n  the argument coordinator: coordinator: expected HOST:PORT"):
        sy.connect("there")


def problems(file: Path | None = None, environment=None, flags=None) -> list[str]:
    """The problems of a refused load, a line each, without the file's folder and the header."""
    with pytest.raises(ConfigurationError) as caught:
        load(file, environment or {}, flags or {})
    header, *lines = str(caught.value).removesuffix(".").split("\n")
    assert "in the settings (docs/reference/configuration.md lists them all):" in header
    assert header.startswith(f"{len(lines)} problem")
    return [line.strip().replace(f"{file.parent}/" if file else "\0", "") for line in lines]


# --- layers


def test_without_any_layer_everything_is_default() -> None:
    loaded = load()
    assert loaded.settings == Settings()
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}
    assert list(loaded.origins) == list(KNOWN.settings)


def test_each_layer_overrides_the_ones_below(write) -> None:
    file = write("job:\n  name: file\n  seed: 1\n  partitions: 2\n")
    environment = {"SHARDYARD_JOB": "environment", "SHARDYARD__JOB__SEED": "2"}
    loaded = load(file, environment, {"job.name": "flag"})
    job = loaded.settings.job
    assert (job.name, job.seed, job.partitions, job.idle_ms) == ("flag", 2, 2, 600_000)
    places = [str(loaded.origins[f"job.{name}"]) for name in ("name", "seed", "partitions", "idle_ms")]
    assert places == ["flag --job-name", "environment SHARDYARD__JOB__SEED", f"{file}:4", "default"]


def test_layers_mix_within_one_section(write) -> None:
    file = write("job: {consistency: {mode: sync}}\n")
    loaded = load(file, {"SHARDYARD__JOB__CONSISTENCY__LOGICAL_RANKS": "4"})
    assert loaded.settings.job.consistency.mode is ConsistencyMode.SYNC
    assert loaded.settings.job.logical_rank_count == 4


def test_every_setting_has_an_environment_variable_and_a_flag() -> None:
    for path, setting in KNOWN.settings.items():
        value = {"coordinator": "host:1", "agent.allow": "/srv"}.get(path) or written(setting.default)
        name = environment_name(path)
        assert str(load(None, {name: value}).origins[path]) == f"environment {name}"
        assert str(load(None, {}, {path: value}).origins[path]).startswith("flag --")


def test_text_from_environment_and_flags_is_read_as_yaml_unless_the_setting_is_text() -> None:
    loaded = load(None, {"SHARDYARD_JOB": "123", "SHARDYARD__JOB__PARTITIONS": "12"}, {"yard.state": "1.5"})
    assert loaded.settings.job.name == "123"
    assert loaded.settings.job.partitions == 12
    assert loaded.settings.yard.state == "1.5"


def test_empty_variable_and_none_flag_count_as_not_given() -> None:
    loaded = load(None, {"SHARDYARD_JOB": "", "SHARDYARD__JOB__SEED": ""}, {"job.seed": None, "no.such": None})
    assert loaded.settings == Settings()


def test_short_name_of_the_coordinator() -> None:
    assert load(None, {"SHARDYARD_COORDINATOR": "10.0.0.1:7070"}).settings.coordinator == "10.0.0.1:7070"


def test_variables_of_a_process_and_of_others_are_no_settings() -> None:
    environment = dict.fromkeys(PROCESS_VARIABLES, "whatever") | {"PATH": "/bin", "SHARDYARDX": "1"}
    loaded = load(None, environment)
    assert loaded.settings == Settings()
    assert loaded.notices == ()


def test_unknown_variable_with_one_underscore_is_a_notice() -> None:
    loaded = load(None, {"SHARDYARD_COORDINATR": "a:1", "SHARDYARD_PIDS": "3"})
    assert loaded.settings.coordinator == ""
    assert loaded.notices == (
        "environment SHARDYARD_COORDINATR: unknown variable; did you mean SHARDYARD_COORDINATOR?",
        "environment SHARDYARD_PIDS: unknown variable; did you mean SHARDYARD_PID?",
    )


def test_unknown_variable_with_two_underscores_is_an_error() -> None:
    said = problems(None, {"SHARDYARD__JOB__SED": "3", "SHARDYARD__SERVERS": "3"})
    assert said == [
        "environment SHARDYARD__JOB__SED: unknown variable; did you mean SHARDYARD__JOB__SEED?",
        "environment SHARDYARD__SERVERS: unknown variable; did you mean SHARDYARD__YARD__SERVERS?",
    ]


def test_two_variables_of_one_setting_must_agree() -> None:
    assert load(None, {"SHARDYARD_JOB": "a", "SHARDYARD__JOB__NAME": "a"}).settings.job.name == "a"
    (said,) = problems(None, {"SHARDYARD_JOB": "a", "SHARDYARD__JOB__NAME": "b"})
    assert "SHARDYARD__JOB__NAME" in said
    assert "SHARDYARD_JOB" in said
    assert "unset one of the two" in said


def test_set_flag() -> None:
    path, flag = parse_set("job.consistency.mode = sync")
    loaded = load(None, {}, dict([(path, flag), parse_set("job.name=7"), parse_set("job.seed=7")]))
    assert loaded.settings.job.consistency.mode is ConsistencyMode.SYNC
    assert (loaded.settings.job.name, loaded.settings.job.seed) == ("7", 7)
    assert str(loaded.origins["job.seed"]) == "flag --set job.seed"


@pytest.mark.parametrize("text", ["job.seed", "=3", ""])
def test_set_flag_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected NAME=VALUE, such as job\.seed=3, got"):
        parse_set(text)


def test_unknown_and_wrong_flags_are_named_as_they_were_typed() -> None:
    said = problems(None, {}, {"job.sede": 1, "yard.servers": Flag("many", "--servers")})
    assert said == [
        "flag --job-sede: job.sede: unknown setting; did you mean job.seed?",
        'flag --servers: yard.servers: expected a whole number from 1 to 1024, got "many" (text)',
    ]


# --- the file


def test_all_problems_of_all_layers_come_in_one_error_with_their_lines(write) -> None:
    file = write(
        "job:\n"
        "  sed: 3\n"
        "  seed: abc\n"
        "  consistency: {mode: snyc, logical_ranks: 99999}\n"
        "  seed: 4\n"
        "  name: 2024-01-01\n"
        "workers: 3\n"
        "log: {level: [a, b]}\n"
        "yard: 3\n"
    )
    assert problems(file, {"SHARDYARD__JOB__IDLE_MS": "1"}, {"worker.device": "gpu"}) == [
        "yard.yaml:2: job.sed: unknown setting; did you mean job.seed?",
        'yard.yaml:3: job.seed: expected a whole number from 0 to 9223372036854775807, got "abc" (text)',
        'yard.yaml:4: job.consistency.mode: expected one of sync, local, hybrid, bounded, async, got "snyc" (text)',
        "yard.yaml:4: job.consistency.logical_ranks: expected a whole number from 1 to 4096 or auto, got 99999",
        "yard.yaml:5: job.seed: given twice, first on line 3; keep one",
        'yard.yaml:6: job.name: expected 1 to 128 letters, digits, ".", "_" or "-", beginning with a letter or digit,'
        " got 2024-01-01 (date); put it in quotes",
        "yard.yaml:7: workers: unknown setting; did you mean yard.workers?",
        "yard.yaml:8: log.level: expected one of debug, info, warning, error, got a list",
        "yard.yaml:9: yard: expected a mapping of settings, got a single value",
        "environment SHARDYARD__JOB__IDLE_MS: job.idle_ms: expected a whole number from 1000 to 604800000, got 1",
        'flag --worker-device: worker.device: expected auto, or devices parted by spaces: cpu, cuda, cuda:N, got "gpu"'
        " (text)",
    ]


def test_wrong_value_is_reported_even_if_a_later_layer_overrides_it(write) -> None:
    assert len(problems(write("job: {seed: x}\n"), {"SHARDYARD__JOB__SEED": "3"})) == 1


def test_unlike_name_lists_what_is_known_there(write) -> None:
    (said,) = problems(write("log:\n  zzzzzz: 1\n"))
    assert said == "yard.yaml:2: log.zzzzzz: unknown setting; expected one of log.format, log.level"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("job:\n\tseed: 3\n", "yard.yaml:2: not YAML:"),
        ("job: {seed: 3\n", "yard.yaml:2: not YAML:"),
        ("job:\n  seed: 3\n---\nlog:\n", "yard.yaml:3: not YAML:"),
        ("- job\n", "yard.yaml:1: expected a mapping of settings (name: value), got a list"),
        ("# comment\n\njust words\n", "yard.yaml:3: expected a mapping of settings (name: value), got a single value"),
        ("? [a]\n: 1\n", "yard.yaml:1: expected the name of a setting, got a list"),
        (b"job:\n  name: \xff\n", "yard.yaml:2: expected UTF-8 text, got byte 0xff"),
        (b"job:\n  name: a\x01\n", "yard.yaml:2: not YAML: special characters are not allowed"),
        ("[" * 60_000, "yard.yaml: nested too deeply"),
        ("#" * (limits.SETTINGS_BYTES_MAX + 1), "yard.yaml: too large; expected at most 65536 bytes"),
        ("job:\n  name: !!python/name:os.system x\n", "yard.yaml:2: job.name: expected 1 to 128 letters"),
        ("job:\n  seed: !!python/object/apply:os.getpid []\n", "yard.yaml:2: job.seed: expected a whole number"),
        ("job:\n  seed: " + "9" * 5_000, "yard.yaml:2: job.seed: expected a whole number"),
        (
            "job:\n  seed:\n",
            "yard.yaml:2: job.seed: expected a whole number from 0 to 9223372036854775807, got nothing",
        ),
    ],
)
def test_unreadable_file_says_where_and_why(write, content: str | bytes, said: str) -> None:
    (line,) = problems(write(content))
    assert line.startswith(said)
    assert len(line) < 300


@pytest.mark.parametrize("value", ['"3"', "3.0", "true", "1:30", "010", "0x10", "2024-13-45", "null", "-1"])
def test_whole_number_is_never_guessed(write, value: str) -> None:
    (line,) = problems(write(f"yard:\n  restarts_max: {value}\n"))
    assert line.startswith("yard.yaml:2: yard.restarts_max: expected a whole number from 0 to 1000, got ")


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["none.yaml: no such file; expected a YAML file of settings"]
    assert "Is a directory" in problems(tmp_path)[0]


@pytest.mark.parametrize("content", ["", "# nothing\n", "job:\n# seed: 3\n", "job: {}\n"])
def test_empty_file_and_empty_section_change_nothing(write, content: str) -> None:
    assert load(write(content)).settings == Settings()


def test_underscores_in_whole_numbers(write) -> None:
    assert load(write("job: {block_bytes: 65_536}\n")).settings.job.block_bytes == 65_536


def test_size_of_blocks_is_fitted_to_the_job_unless_it_is_given(write) -> None:
    assert load().settings.job.block_bytes == "auto"
    assert load(write("job: {block_bytes: auto}\n")).settings.job.block_bytes == "auto"
    assert load(None, {"SHARDYARD__JOB__BLOCK_BYTES": "128"}).settings.job.block_bytes == 128


# --- bounds and relations


@pytest.mark.parametrize("address", ["", "localhost:1", "10.0.0.1:65535", "[::1]:7070", "ps-0.yard.svc:7070"])
def test_address_is_taken(address: str) -> None:
    assert load(None, {}, {"coordinator": address}).settings.coordinator == address


@pytest.mark.parametrize(
    "address", ["localhost", ":7070", "host:0", "host:65536", "host:", "::1:7070", "http://host:1", "a b:1", "host:１"]
)
def test_address_must_be_host_and_port(address: str) -> None:
    (said,) = problems(None, {}, {"coordinator": address})
    assert said.startswith("flag --coordinator: coordinator: expected HOST:PORT with a port from 1 to 65535")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "cuda:0 cuda:1", "cpu cpu"])
def test_device_is_taken(device: str) -> None:
    assert load(None, {}, {"worker.device": device}).settings.worker.device == device


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("worker.device", "cuda:"),
        ("worker.device", "cuda:01"),
        ("worker.device", "auto cpu"),
        ("worker.device", "cuda:0,cuda:1"),
        ("job.name", "a/b"),
        ("job.name", "-a"),
        ("job.name", "a" * 129),
        ("job.block_bytes", 100),
        ("job.block_bytes", "whole"),
        ("job.partitions", limits.PARTITIONS_MAX + 1),
        ("job.partitions", "many"),
        ("job.consistency.logical_ranks", limits.LOGICAL_RANKS_MAX + 1),
        ("yard.bind", "0.0.0.0:1"),
        ("yard.state", ""),
        ("job.compression.momentum", 1.0),
        ("job.compression.momentum", float("nan")),
        ("job.compression.clip", -1.0),
        ("job.compression.clip", float("inf")),
        ("job.compression.whole_elements_max", -1),
        ("job.consistency.staleness_scaling", "linear"),
        ("job.consistency.delay_compensation", -0.1),
        ("job.consistency.delay_compensation", float("inf")),
        ("job.consistency.delay_compensation_decay", 1.0),
    ],
)
def test_value_out_of_bounds_is_refused(path: str, value: object) -> None:
    (said,) = problems(None, {}, {path: value})
    assert f"{path}: expected {KNOWN.settings[path].expected}, got " in said


def test_bounds_themselves_are_taken() -> None:
    flags = {"job.partitions": limits.PARTITIONS_MAX, "job.consistency.logical_ranks": 1, "job.name": "a" * 128}
    assert load(None, {}, flags).settings.job.partition_count == limits.PARTITIONS_MAX


def test_heartbeats_follow_the_lease() -> None:
    membership = load(None, {}, {"membership.lease_ms": 1_000}).settings.membership
    assert membership.heartbeat_every_ms == 125
    assert load(None, {}, {}).settings.membership.heartbeat_every_ms == 500


def test_lease_must_outlast_three_heartbeats(write) -> None:
    file = write("membership:\n  lease_ms: 1200\n")
    assert load(file, {}, {"membership.heartbeat_ms": 400}).settings.membership.lease_ms == 1200
    assert problems(file, {}, {"membership.heartbeat_ms": 401}) == [
        "membership.lease_ms (yard.yaml:2) and membership.heartbeat_ms (flag --membership-heartbeat-ms):"
        " expected lease_ms >= 3 * heartbeat_ms = 1203, so that one lost heartbeat does not count as a death,"
        " got lease_ms 1200 with heartbeat_ms 401"
    ]


def test_automatic_logical_ranks_of_a_sync_job_have_a_limit() -> None:
    flags: dict[str, object] = {"job.workers_expected": limits.LOGICAL_RANKS_MAX + 1}
    assert load(None, {}, flags).settings.job.logical_rank_count == limits.LOGICAL_RANKS_MAX + 1
    (said,) = problems(None, {}, flags | {"job.consistency.mode": "sync"})
    assert "job.consistency.logical_ranks (default): expected at most 4096 logical ranks in sync mode" in said
    fixed = flags | {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 4}
    assert load(None, {}, fixed).settings.job.logical_rank_count == 4


@pytest.mark.parametrize("setting", [("staleness_scaling", "inverse"), ("delay_compensation", 0.04)])
def test_stale_gradients_are_those_of_asynchronous_jobs(setting: tuple[str, object]) -> None:
    flags = {f"job.consistency.{setting[0]}": setting[1]}
    for mode in ("async", "bounded"):
        assert load(None, {}, flags | {"job.consistency.mode": mode}).settings.job.consistency.stale is not None
    (said,) = problems(None, {}, flags | {"job.consistency.mode": "sync"})
    assert f"expected mode async or bounded with {setting[0]}" in said
    assert load(None, {}, {"job.consistency.mode": "sync"}).settings.job.consistency.stale is None


def test_decay_is_that_of_a_compensation() -> None:
    flags: dict[str, object] = {"job.consistency.delay_compensation_decay": 0.95}
    (said,) = problems(None, {}, flags)
    assert "a delay_compensation that it changes" in said
    stale = load(None, {}, flags | {"job.consistency.delay_compensation": 2.0}).settings.job.consistency.stale
    assert stale == StaleRule(compensation=2.0, decay=0.95)


def test_compensation_and_a_log_exclude_each_other_and_say_why() -> None:
    flags: dict[str, object] = {"job.consistency.delay_compensation": 0.04, "job.durability": "wal"}
    (said,) = problems(None, {}, flags)
    assert "a log does not have the values that a gradient was computed on" in said
    scaled = {"job.consistency.staleness_scaling": "inverse", "job.durability": "wal"}
    assert load(None, {}, scaled).settings.job.consistency.stale == StaleRule(divides_rate=True)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("push", "int9", "one of none, bf16, fp16, int8[:BUCKET]"),
        ("push", "none+zstd", "+zstd after one of bf16, int8, qsgd: float32 gradients shrink by 6%, at 45 ms"),
        ("push", "delta", "one of none"),
        ("pull", "topk:0.1", "one of none, bf16, fp16, int8[:BUCKET], delta[:BUCKET]"),
        ("push", "*.weight=topk:2 *=int8", "DENSITY, the part of the elements that is sent"),
        ("push", "a b", "one codec, or rules PATTERN=CODEC parted by spaces"),
    ],
)
def test_wrong_codec_is_named_with_what_is_wrong_in_it(path: str, text: str, expected: str) -> None:
    (said,) = problems(None, {}, {f"job.compression.{path}": text})
    assert said.startswith(f"flag --job-compression-{path}: job.compression.{path}: expected {expected}")
    with pytest.raises(ConfigurationError, match=re.escape(f"job.compression.{path}: expected {expected}")):
        parse_job_settings(json.dumps({"compression": {path: text}}))


@pytest.mark.parametrize(("name", "value"), [("momentum", 0.9), ("clip", 1.0), ("warmup_steps", 10)])
def test_settings_of_topk_need_a_topk(write, name: str, value: float) -> None:
    file = write(f"job:\n  compression:\n    {name}: {value}\n")
    assert load(file, {}, {"job.compression.push": "*.weight=topk:0.01"}).settings.job.compression.push_rules.compresses
    assert problems(file) == [
        f"job.compression.{name} (yard.yaml:3) and job.compression.push (default): expected {name} 0, or topk in push,"
        f" got {name} {value} with 'none'"
    ]


def test_settings_are_frozen_and_closed() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.job.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Settings.model_validate({"jop": {}})


def test_auto_partitions() -> None:
    assert JobSettings().partition_count == 8
    assert JobSettings(partitions=3).partition_count == 3


# --- the job section on the wire


def test_job_settings_survive_the_way_to_the_coordinator() -> None:
    flags = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 4, "job.seed": (1 << 63) - 1}
    job = load(None, {}, flags).settings.job
    assert parse_job_settings(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"sed": 3}', "job settings (JSON): job.sed: unknown setting; did you mean job.seed?"),
        ('{"seed": "3"}', "job settings (JSON): job.seed: expected a whole number from 0 to"),
        (
            '{"partitions": "many"}',
            'job.partitions: expected a whole number from 1 to 4096 or auto, got "many" (text).',
        ),
        ("{", "job settings (JSON): job: Invalid JSON"),
        ('{"workers_expected": 5000, "consistency": {"mode": "sync"}}', "expected at most 4096 logical ranks"),
        (" " * (limits.SETTINGS_BYTES_MAX + 1), "expected at most 65536 bytes"),
    ],
)
def test_job_settings_of_a_peer_are_held_against_the_same_rules(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_job_settings(text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("1 problem ")


# --- explanation, documentation, examples


def test_explanation_has_every_setting_with_value_and_origin(write) -> None:
    file = write("job:\n  seed: 7\n")
    loaded = load(file, {"SHARDYARD_JOB": "ads"}, dict([parse_set("job.consistency.mode=sync")]))
    origins = {path: str(origin) for path, origin in loaded.origins.items()}
    assert list(origins) == list(KNOWN.settings)
    job = loaded.settings.job
    assert (job.seed, origins["job.seed"]) == (7, f"{file}:2")
    assert (job.name, origins["job.name"]) == ("ads", "environment SHARDYARD_JOB")
    assert (job.consistency.mode, origins["job.consistency.mode"]) == (
        ConsistencyMode.SYNC,
        "flag --set job.consistency.mode",
    )
    assert (loaded.settings.yard.servers, origins["yard.servers"]) == (2, "default")


def test_rendered_explanation_is_an_aligned_table() -> None:
    loaded = load(None, {"SHARDYARD_JOB": "ads"}, {"job.consistency.mode": "sync"})
    header, *rows = render_explanation(loaded).splitlines()
    assert header.split() == ["SETTING", "VALUE", "FROM", "WHAT", "IT", "IS"]
    assert len(rows) == len(KNOWN.settings)
    starts = [header.index(word) for word in ("VALUE", "FROM", "WHAT")]
    for row in rows:
        assert all(row[start - 2 : start] == "  " and row[start] != " " for start in starts), row
    by_path = {row.split()[0]: row for row in rows}
    assert by_path["coordinator"].split()[1:3] == ['""', "default"]
    assert by_path["job.consistency.mode"].split()[1:4] == ["sync", "flag", "--job-consistency-mode"]
    assert by_path["job.name"].split()[1:4] == ["ads", "environment", "SHARDYARD_JOB"]


def test_every_setting_is_described_and_bounded() -> None:
    for path, setting in KNOWN.settings.items():
        assert setting.description.endswith("."), path
        assert setting.expected, path
        assert setting.adapter.validate_python(setting.default) == setting.default


def test_documentation_lists_every_setting_as_it_is() -> None:
    lines = (ROOT / "docs/reference/configuration.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `") and line.split("`")[1] in KNOWN.settings]
    expected = [
        f"| `{path}` | `{written(setting.default)}` | {setting.expected} | {setting.description} |"
        for path, setting in KNOWN.settings.items()
    ]
    assert rows == expected


def test_documentation_names_every_variable() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()
    for name in (*PROCESS_VARIABLES, *SHORT_NAMES):
        assert f"`{name}`" in page


EXAMPLES = ["local", "sync", "async", "async-stale", "bounded", "compose", "compression", "checkpoints", "metrics"]
EXAMPLES += ["mixed-precision", "recommender", "hybrid", "warm-up", "cool-down", "change-strategy", "gpt", "pipeline"]
EXAMPLES += ["sharded", "tensor", "sharded-tables", "pipelines-servers", "sharded-servers", "pipelines-async"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_valid(name: str) -> None:
    loaded = load(ROOT / "configs" / f"{name}.yaml")
    assert loaded.settings.job.name == name


def test_all_examples_load_and_mean_what_they_are_for() -> None:
    loaded = {file.stem: load(file).settings for file in sorted((ROOT / "configs").glob("*.yaml"))}
    assert loaded["sync"].job.consistency.mode is ConsistencyMode.SYNC
    assert loaded["sync"].job.logical_rank_count == 2
    assert (loaded["hybrid"].job.consistency.rows_at_once, loaded["sync"].job.consistency.rows_at_once) == (True, False)
    assert loaded["async"].job.consistency.mode is ConsistencyMode.ASYNC
    assert (loaded["bounded"].job.consistency.bound, loaded["async"].job.consistency.bound) == (3, None)
    assert (loaded["recommender"].job.consistency.bound, loaded["recommender"].job.checkpoint.every_s) == (4, 60)
    assert loaded["async-stale"].job.consistency.stale == StaleRule(compensation=2.0, decay=0.95)
    assert loaded["async"].job.consistency.stale is None
    assert (loaded["local"].yard.servers, loaded["local"].yard.workers) == (2, 2)
    assert loaded["gpt"].job.consistency.mode is ConsistencyMode.SYNC
    assert (loaded["gpt"].job.clip.norm, loaded["gpt"].yard.workers) == (1.0, 2)
    assert (loaded["pipeline"].job.pipeline.stages_in_all, loaded["pipeline"].job.logical_rank_count) == (2, 1)
    assert [loaded[name].job.has_replicas for name in ("pipelines", "pipelines-servers")] == [True, False]
    assert (loaded["sharded-servers"].job.has_replicas, loaded["sharded-servers"].job.logical_rank_count) == (False, 2)
    assert loaded["pipelines-async"].job.consistency.mode is ConsistencyMode.ASYNC
    assert (loaded["sharded"].job.logical_rank_count, loaded["sharded"].job.workers_per_rank) == (2, 1)
    assert (loaded["tensor"].job.logical_rank_count, loaded["tensor"].job.workers_per_rank) == (1, 2)
    assert (loaded["sharded-tables"].job.strategy, loaded["sharded-tables"].yard.servers) == (Strategy.SHARDED, 2)
    assert loaded["compression"].job.compression.push_rules.kinds == {"none", "topk"}
    assert (loaded["checkpoints"].job.checkpoint.every_steps, loaded["checkpoints"].job.checkpoint.keep) == (1_000, 5)
    assert loaded["metrics"].metrics.tensorboard == "runs"
    assert loaded["local"].metrics.tensorboard == ""
    assert loaded["compose"].coordinator == "coordinator:7070"
    assert loaded["compose"].yard.bind == "0.0.0.0"


@pytest.mark.parametrize(
    ("given", "servers", "workers"),
    [
        ({"job.strategy": "central_storage"}, 1, 2),
        ({"job.strategy": "central_storage", "yard.servers": 3}, 3, 2),
        ({"job.strategy": "mirrored", "worker.device": "cuda:0 cuda:1 cuda:3"}, 2, 3),
        ({"job.strategy": "mirrored", "worker.device": "cpu cpu", "yard.workers": 5}, 2, 5),
        ({"job.strategy": "mirrored"}, 2, 2),
    ],
)
def test_a_strategy_of_one_machine_says_what_is_started(given: dict[str, object], servers: int, workers: int) -> None:
    yard = load(None, {}, given).settings.yard
    assert (yard.servers, yard.workers) == (servers, workers)
