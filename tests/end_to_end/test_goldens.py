"""The whole way from the driver to the page, pinned byte for byte: tests/goldens changes only where one looks at it.

`make goldens` (pytest --write-goldens) rewrites the files; review their difference in git.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from commands import run_command
from golden_boxes import FOLDER, GOLDENS, RECORDED, Golden, dcgm, render_replay, state_document

from gpuwarden.nvml.interface import FUNCTIONS
from mock_nvml import MockNvml

Check: TypeAlias = "Callable[[str, bytes], None]"
BOXES = [pytest.param(golden, id=name) for name, golden in GOLDENS.items()]
BOX_SCRIPT = Path(__file__).parents[1] / "support/golden_boxes.py"
WITH_DCGM = ("h100", "mig", "h200")  # whose page of DCGM's names is pinned as well
WITH_STATE = ("h100", "mig", "broken")  # whose `/api/v1/state` is pinned as well
# What is no question with an answer of its own: the start and end, the look-up, what samples and events are kept in.
NO_QUESTIONS = {
    "nvmlInit",
    "nvmlShutdown",
    "nvmlSystemGetDriverVersion",  # these three are of the driver: the page has them
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlDeviceGetMemoryLimits_v1",  # of cgroups, which a capture has none of
    "nvmlEventSetCreate",  # events of the time of recording are not reported again
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
    *(name for name in FUNCTIONS if name.startswith("nvmlEventSet") and name.endswith(("_v1", "_v3"))),
    "nvmlEventSetFree",
    *(name for name in FUNCTIONS if name.startswith(("nvmlSystemEventSet", "nvmlSystemRegisterEvents"))),
}


class Made:
    """Hosts that were recorded and polled in this run, each once."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self.folder = folder
        self.make = functools.cache(self._make)

    def _make(self, name: str) -> None:
        """Record and poll the box on the mock library, in a process of its own."""
        own = self.folder / name
        own.mkdir()
        env = MockNvml(self._library, own).env(frozen=1, **GOLDENS[name].settings)
        done = run_command(name, str(self.folder), env=env, script=BOX_SCRIPT)
        assert done.returncode == 0, done.stderr

    def file(self, name: str, ending: str) -> bytes:
        """Return the results of a host."""
        self.make(name)
        return (self.folder / f"{name}.{ending}").read_bytes()

    def survival(self, name: str) -> tuple[set[str], list[str]]:
        """Return the functions that the recording of a box asked, and the questions whose answers did not survive."""
        asked, differing = json.loads(self.file(name, "survival"))
        return set(asked), differing


@pytest.fixture(scope="module")
def made(mock_nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Record hosts on the mock library."""
    return Made(mock_nvml_library, tmp_path_factory.mktemp("goldens"))


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Compare with a file of tests/goldens, or write it."""
    writes = request.config.getoption("--write-goldens")

    def compare(file: str, content: bytes) -> None:
        if writes:
            (FOLDER / file).write_bytes(content)
        committed = (FOLDER / file).read_bytes()
        # As lists of lines pytest shows where they part.
        assert content.decode().splitlines() == committed.decode().splitlines(), "if that is right: make goldens"
        assert content == committed

    return compare


@pytest.mark.parametrize("golden", BOXES)
class TestGoldens:
    """Each host, from its driver to its page."""

    def test_capture(self, golden: Golden, made: Made, check: Check) -> None:
        """Recorded through the real binding, the box gives the committed capture."""
        check(f"{golden.name}.json", made.file(golden.name, "json"))

    def test_page_of_the_capture(self, golden: Golden, check: Check) -> None:
        """The committed capture gives the committed page."""
        check(f"{golden.name}.prom", render_replay(FOLDER / f"{golden.name}.json"))

    def test_page_of_the_driver(self, golden: Golden, made: Made, check: Check) -> None:
        """Polled through the real binding, the box gives the page that its replay gives."""
        check(f"{golden.name}.prom", made.file(golden.name, "prom"))

    def test_answers_survive(self, golden: Golden, made: Made) -> None:
        """Every recorded call returns from the file what the driver answers."""
        assert made.survival(golden.name)[1] == []


@pytest.mark.parametrize("name", RECORDED)
def test_page_of_what_was_recorded_once(name: str, check: Check) -> None:
    """A capture that cannot be recorded again gives the committed page."""
    check(f"{name}.prom", render_replay(FOLDER / f"{name}.json"))


def test_capture_of_the_first_version() -> None:
    """A file of an early version is replayed with the data it has."""
    page = render_replay(FOLDER / "first.json")
    assert b"gpuwarden_gpu_memory_used_bytes{" in page
    assert b"gpuwarden_gpu_bar1_size_bytes{" not in page  # was not asked then


@pytest.mark.parametrize("name", WITH_DCGM)
def test_page_of_dcgm_names(name: str, check: Check) -> None:
    """The committed capture gives the committed page of DCGM's names."""
    check(f"{name}.dcgm.prom", render_replay(FOLDER / f"{name}.json", dcgm()))


@pytest.mark.parametrize("name", WITH_STATE)
def test_state_document(name: str, check: Check) -> None:
    """The committed capture gives the committed answer of the API."""
    check(f"{name}.state.json", state_document(FOLDER / f"{name}.json"))


def test_every_function_is_recorded(made: Made) -> None:
    """Every function of the driver binding is called in the recording of some host, and so compared."""
    asked = set[str]().union(*(made.survival(name)[0] for name in GOLDENS))
    assert asked | NO_QUESTIONS == set(FUNCTIONS)
    assert not asked & NO_QUESTIONS


def test_no_file_is_left_over() -> None:
    """Every file in tests/goldens is used by a test."""
    wanted = {f"{name}.{ending}" for name in (*GOLDENS, *RECORDED) for ending in ("json", "prom")}
    wanted |= {f"{name}.dcgm.prom" for name in WITH_DCGM} | {f"{name}.state.json" for name in WITH_STATE}
    assert {file.name for file in FOLDER.iterdir() if file.name != "scenarios"} == wanted
