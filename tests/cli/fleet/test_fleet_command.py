"""Command `gpuwarden fleet init`: the files that it writes, and those that it keeps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gpuwarden.cli.main import main

REPOSITORY = Path(__file__).parents[3]


SAMPLE_LIMIT = 150_000


def init(folder: Path, *arguments: str) -> int:
    """Write the configuration of a fleet to a folder; return the exit status."""
    return main(["fleet", "init", *arguments, "--out", str(folder)])


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file in a folder, by its name."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("engine", "file", "keeps_firing"),
    [("prometheus", "prometheus.yml", True), ("victoriametrics", "scrape.yml", False)],
)
def test_files_of_an_engine(tmp_path: Path, engine: str, file: str, keeps_firing: bool) -> None:  # noqa: FBT001
    """Each engine gets its configuration, targets with the daemon's port, its form of the rules, and all dashboards."""
    assert init(tmp_path, "box1", "[::1]", "box2:9000", "box1", "--engine", engine) == 0
    written = contents(tmp_path)
    shipped = contents(REPOSITORY / "grafana" / "dashboards")
    assert {name: text for name, text in written.items() if "dashboards/" in name} == {
        f"dashboards/{name}": text for name, text in shipped.items()
    }
    assert json.loads(written["targets/gpuwarden.json"]) == [{"targets": ["box1:9846", "[::1]:9846", "box2:9000"]}]
    (scrape,) = yaml.safe_load(written[file])["scrape_configs"]
    assert (scrape["job_name"], scrape["sample_limit"]) == ("gpuwarden", SAMPLE_LIMIT)
    rules = yaml.safe_load(written["rules/gpuwarden.yml"])["groups"]
    assert {group["interval"] for group in rules} == {"15s", "30s", "1m"}
    assert any("keep_firing_for" in rule for group in rules for rule in group["rules"]) is keeps_firing


@pytest.mark.parametrize(
    "name",
    [
        "deploy/prometheus/prometheus.yml",
        "deploy/prometheus/agent.yml",
        "deploy/helm/gpuwarden/templates/monitor.yaml",
        "docs/understand/shared-machines.md",
    ],
)
def test_sample_limit_is_that_of_other_files(name: str) -> None:
    """Other configurations, and the page of the limit's reason, have the limit of the written configuration."""
    assert re.findall(r"sample_?[lL]imit: (\d+)", (REPOSITORY / name).read_text()) == [str(SAMPLE_LIMIT)]


def test_changed_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with other contents is named and nothing is written, unless forced; the same contents are no conflict."""
    assert init(tmp_path, "box1") == 0
    assert init(tmp_path, "box1") == 0
    (tmp_path / "prometheus.yml").write_bytes(b"mine \xff\n")
    (tmp_path / "rules" / "gpuwarden.yml").unlink()
    capsys.readouterr()
    assert init(tmp_path, "box1") == 1
    assert capsys.readouterr().err == (
        f"gpuwarden fleet init: these exist with other contents; --force overwrites them: {tmp_path}/prometheus.yml\n"
    )
    assert (tmp_path / "prometheus.yml").read_bytes() == b"mine \xff\n"
    assert not (tmp_path / "rules" / "gpuwarden.yml").exists()
    assert init(tmp_path, "box1", "--force") == 0
    assert "mine" not in contents(tmp_path)["prometheus.yml"]
    assert (tmp_path / "rules" / "gpuwarden.yml").exists()


def test_printed_commands_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a blank in its name is one argument in the printed commands."""
    folder = tmp_path / "my fleet"
    assert init(folder, "box1", "--engine", "victoriametrics") == 0
    printed = [line.removeprefix("run ") for line in capsys.readouterr().out.splitlines() if line.startswith("run ")]
    commands = [shlex.split(line) for line in printed]
    assert f"-promscrape.config={folder}/scrape.yml" in commands[0]
    assert f"-rule={folder}/rules/*.yml" in commands[1]


def test_ipv6_address_without_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the whole address."""
    with pytest.raises(SystemExit, match="2"):
        init(tmp_path, "2001:db8::5")
    assert "write [2001:db8::5]:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["a b", "http://box1", "::1", "box1:99999", ""])
def test_wrong_host_is_refused(tmp_path: Path, host: str) -> None:
    """A host that no engine could scrape ends with status 2 before anything is written."""
    with pytest.raises(SystemExit, match="2"):
        init(tmp_path / "fleet", "box1", host)
    assert not (tmp_path / "fleet").exists()
