"""The configuration as a whole: defaults, a file, overrides, and every problem at once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offenders import check_all

from gpuwarden.cli.common.config_flags import KNOWN_NAMES
from gpuwarden.config.loader import ConfigError, load, parse
from gpuwarden.config.schema import OPTIONS, SECTIONS, Config
from gpuwarden.config.value_types import Address, SourceChoice

if TYPE_CHECKING:
    from collections.abc import Callable

YAML_PIECES = [*OPTIONS, *SECTIONS, *"\n :#&*!|>-?[]{},\"'%@`\\\t~=<01aé", "  ", ": ", "- ", "\n  ", "---\n", "!!str "]


def problems(text: str) -> list[str]:
    """Parse an invalid `text` and return its problems as lines."""
    with pytest.raises(ConfigError) as raised:
        parse(text, "bad.yaml", KNOWN_NAMES)
    return str(raised.value).split("\n")


def refusal(read: Callable[[], Config]) -> list[str]:
    """Return the problems of a configuration as lines, none if it is read."""
    try:
        read()
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def write(key: str, text: str) -> str:
    """Return a file that sets one option, quoted."""
    section, _, name = key.rpartition(".")
    return f"{section}:\n  {name}: '{text}'" if section else f"{name}: '{text}'"


def value(config: Config, key: str) -> object:
    """Return the option that `key` names."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def test_defaults() -> None:
    """Without a file, and with an empty one, the defaults hold."""
    assert load(None) == parse("", "empty.yaml") == Config()
    assert (Config().source, Config().web.listen) == (SourceChoice("nvml"), ("127.0.0.1", 9846))
    assert (Config().poll.interval, Config().runs.context_overhead) == (1.0, 512 * 2**20)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("source", "simulated", SourceChoice("simulated")),
        ("log.level", "debug", "debug"),
        ("web.listen", "[::]:80", Address("::", 80)),
        ("web.max_connections", "5", 5),
        ("web.timeout", "1m", 60.0),
        ("metrics.profile", "minimal", "minimal"),
        ("poll.interval", "250ms", 0.25),
        ("gpus.gpm", "false", False),
        ("gpus.pcie_throughput", "true", True),
        ("processes.series", "true", True),
        ("processes.max_series", "7", 7),
        ("owners.max", "5", 5),
        ("owners.docker", "none", None),
        ("owners.podman", "/run/p.sock", Path("/run/p.sock")),
        ("owners.kubernetes_logs", "/logs", Path("/logs")),
        ("owners.slurm_job_map", "/map", Path("/map")),
        ("owners.slurm_gpustat", "none", None),
        ("runs.socket", "/tmp/run.sock", Path("/tmp/run.sock")),  # noqa: S108  a path is only read here
        ("runs.socket_mode", "0660", 0o660),
        ("runs.socket_group", "ml-users", "ml-users"),
        ("runs.max", "16", 16),
        ("runs.expiry", "30s", 30.0),
        ("runs.context_overhead", "1GiB", 2**30),
        ("pressure.memory_warning", "20%", 0.2),
        ("pressure.memory_critical", "0.01", 0.01),
        ("pressure.hold", "5s", 5.0),
        ("simulation.gpus", "2", 2),
    ],
)
def test_each_option(key: str, text: str, expected: object) -> None:
    """An option of the file sets its value only, and the others keep their defaults."""
    config = parse(write(key, text), "f")
    assert value(config, key) == expected
    assert [other for other in OPTIONS if value(config, other) != value(Config(), other)] == [key]


@check_all({key: key for key, row in OPTIONS.items() if row.kind.bounds})
def test_declared_bounds_hold(key: str) -> None:
    """The documented bounds are the ones that are checked."""
    least, most = OPTIONS[key].kind.bounds.split(" to ")
    for bound in (least, most):
        assert value(parse(write(key, bound) + partner_of(key), "f"), key) == OPTIONS[key].kind.read(bound)
    assert re.search("is too (large|long); maximum", problems(write(key, "9" + most))[0])


def partner_of(key: str) -> str:
    """Return the option that this one is compared with, set to its most distant value."""
    for ending, other, which in (("_warning", "_critical", 0), ("_critical", "_warning", 1)):
        if key.startswith("pressure.") and key.endswith(ending):
            partner = key.removesuffix(ending) + other
            return f"\n  {partner.partition('.')[2]}: {OPTIONS[partner].kind.bounds.split(' to ')[which]}"
    return ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pressure: {memory_critical: 10%}",
            [
                "memory_critical: pressure.memory_critical (0.1) must be less than pressure.memory_warning (0.1)",
            ],
        ),
        (
            "pressure: {oom_warning: 30s}",
            ["oom_warning: pressure.oom_critical (60) must be less than pressure.oom_warning (30)"],
        ),
        ("pressure: {memory_warning: 20%, memory_critical: 0.1}", []),
        (
            "pressure: {thermal_warning: soon, thermal_critical: 40}",
            ["thermal_warning: soon is not a number; write digits, such as 8 or 0.5"],
        ),
    ],
)  # fmt: skip
def test_critical_lies_beyond_warning(text: str, expected: list[str]) -> None:
    """A critical threshold before its warning is rejected, if both are valid alone."""
    found = problems(text) if expected else [] if parse(text, "bad.yaml") else ["nothing"]
    assert [problem.partition("pressure.")[2] for problem in found] == expected


@pytest.mark.parametrize("gpus", ["-1", "[0, 1]", "[GPU-5, 8]", "all"])
def test_expected_gpus(gpus: str) -> None:
    """Expected GPUs are their number or UUIDs; indexes would make each node unfit."""
    (problem,) = problems(f"check: {{gpus: {gpus}}}")
    assert "check.gpus: write UUIDs, such as GPU-…, or the number of GPUs" in problem
    assert parse("check: {gpus: [GPU-5, GPU-7]}", "good.yaml").check.gpus == ("GPU-5", "GPU-7")
    assert parse("check: {gpus: 8}", "good.yaml").check.gpus == ("8",)


@pytest.mark.parametrize(
    "text",
    [
        "runs: {socket: /run/one.sock}\ncontrol: {socket: /run/one.sock}",
        "runs: {socket: /run/one.sock}\ncontrol: {socket: one.sock}",
        "runs: {socket: /run/gpuwarden/control.sock}",
    ],
)
def test_sockets_are_two(text: str) -> None:
    """The same path for both sockets is rejected, in any notation."""
    (problem,) = problems(text)
    assert problem.endswith("use two paths")


@pytest.mark.parametrize("mode", ["0660", '"0660"', "0o660"])
def test_socket_mode_is_octal(mode: str) -> None:
    """A mode means the same with quotes and without, though YAML 1.1 reads a bare 0660 as 432."""
    assert parse(f"runs: {{socket_mode: {mode}}}", "f").runs.socket_mode == 0o660


def test_all_problems_at_once() -> None:
    """Problems of structure and of values are reported together, in the order of their places."""
    text = "poll:\n  interval: soon\n  color: red\nlog: {level: loud}\nweb:\n\n  timeout: 10ms\nsource:\n"
    assert problems(text) == [
        "bad.yaml:2:3: poll.interval: soon is not a duration; write 250ms, 1s, 2m or 1h (a bare number is seconds)",
        "bad.yaml:3:3: poll.color: unknown; known here: interval, slow_interval, memory_interval",
        "bad.yaml:4:7: log.level: loud is not a log level; write debug, info, warning or error",
        "bad.yaml:7:3: web.timeout: 10ms is too short; minimum 100ms",
        "bad.yaml:8:1: source: no value; set one, or remove the line for the default",
    ]


def test_problems_have_parts() -> None:
    """Programs can read the parts of a problem."""
    with pytest.raises(ConfigError) as raised:
        parse("poll:\n  interval: 10ms", "bad.yaml")
    (problem,) = raised.value.problems
    assert (problem.source, problem.place, problem.key) == ("bad.yaml", (2, 3), "poll.interval")


def test_overrides_win(tmp_path: Path) -> None:
    """An override replaces the value of the file, and nothing else."""
    path = tmp_path / "config.yaml"
    path.write_text("web: {listen: '0.0.0.0:1', timeout: 5s}")
    web = load(path, {"web.listen": "127.0.0.1:0"}).web
    assert (web.listen, web.timeout) == (("127.0.0.1", 0), 5.0)


def test_overrides_are_reported_by_flag(tmp_path: Path) -> None:
    """A wrong override is reported under the flag it was given with, after the problems of the file."""
    path = tmp_path / "config.yaml"
    path.write_text("poll: {interval: 0}")
    with pytest.raises(ConfigError) as raised:
        load(path, {"web.listen": "here", "source": "dcgm"}, flags={"web.listen": "--listen", "source": "--source"})
    assert str(raised.value).split("\n") == [
        f"{path}:1:8: poll.interval: 0 is too short; minimum 100ms",
        '--listen: here is not a listen address; write HOST:PORT, such as 127.0.0.1:9846 or "[::1]:9846"',
        "--source: dcgm is not a source; write nvml, auto, simulated or capture:FILE",
    ]


def test_missing_file_and_wrong_override(tmp_path: Path) -> None:
    """A file that cannot be read does not hide a wrong flag."""
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "none.yaml", {"log.level": "loud"})
    assert [problem.source for problem in raised.value.problems] == [str(tmp_path / "none.yaml"), "log.level"]


def test_frozen() -> None:
    """A configuration is frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().poll.interval = 2.0  # type: ignore[misc]  # the assignment that must fail


@given(st.text(st.characters(codec=None)) | st.lists(st.sampled_from(YAML_PIECES), max_size=40).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Any file gives a configuration, or a ConfigError with printable lines."""
    assert all(line.isprintable() for line in refusal(lambda: parse(text, "f")))


@given(st.sampled_from(sorted(OPTIONS)), st.text(st.characters(codec=None)))
def test_any_override_is_read_or_refused(key: str, text: str) -> None:
    """Any flag gives a value, or one problem under the flag's name."""
    lines = refusal(lambda: load(None, {key: text}, {key: "--flag"}))
    assert not lines or (len(lines) == 1 and lines[0].startswith("--flag: "))


def test_shown_values_stay_readable() -> None:
    """A value with a line break is shown on one line."""
    assert problems('log: {level: "a\\nb"}') == [
        r"bad.yaml:1:7: log.level: 'a\nb' is not a log level; write debug, info, warning or error",
    ]
