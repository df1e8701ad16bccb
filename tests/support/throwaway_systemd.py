"""Steps of a test file that runs in a temporary systemd (tests/systemd/boot.sh)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from services import ROOT

from system_parts import needs, require

SETTINGS = Path("/proc/sys")
# Written by the kernel itself at any time.
NOT_SET = {"kernel/hung_task_warnings", "kernel/ns_last_pid", "kernel/perf_event_max_sample_rate", "kernel/tainted"}
OF_AN_INTERFACE = {"conf", "neigh"}  # folders; a router on the network sets some of these


def needs_systemd() -> None:
    """Skip the test where no systemd can be booted; in CI fail it."""
    needs("systemctl", "systemd")
    require(os.geteuid() == 0 and _can_unshare(), "only root can boot a systemd: run this test as root")


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def step_names(file: Path) -> list[str]:
    """Return the names of the tests in a file, in order."""
    return re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)


@contextlib.contextmanager
def unchanged_settings() -> Iterator[None]:
    """Fail if a setting of this machine's kernel differs afterwards; the message names each."""
    before = _read_settings()
    yield
    after = _read_settings()
    kept = before.keys() & after.keys()  # modules that are loaded meanwhile bring settings
    changed = [f"{name} from {before[name]} to {after[name]}" for name in sorted(kept) if after[name] != before[name]]
    assert not changed, f"booting a systemd changed settings of this machine's kernel: {', '.join(changed)}"


def _read_settings() -> dict[str, str]:
    """Return the settings that sysctl(8) can set, by their path in /proc/sys."""
    settings = {}
    for folder, folders, files in os.walk(SETTINGS):
        folders[:] = [each for each in folders if each not in OF_AN_INTERFACE]
        for path in (Path(folder, each) for each in files):
            with contextlib.suppress(OSError):  # a secret, or a file that is only written
                if path.stat().st_mode & stat.S_IWUSR:
                    settings[str(path.relative_to(SETTINGS))] = path.read_text(errors="replace").strip()
    return {name: value for name, value in settings.items() if name not in NOT_SET}


def run_steps(file: Path, shared: Path) -> dict[str, list[str]]:
    """Run a test file in a systemd that is thrown away; return the failures of each test.

    Fails if that changed a setting of this machine's kernel.
    """
    tests = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    options = ["-c", f"{ROOT}/pyproject.toml", "--rootdir", str(ROOT), "--junitxml", f"{shared}/report.xml"]
    boot = [str(ROOT / "tests/systemd/boot.sh"), str(shared)]
    with unchanged_settings():
        done = subprocess.run([*boot, *tests, *options], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"boot.sh ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    steps: dict[str, list[str]] = {}
    for case in ET.parse(shared / "report.xml").iter("testcase"):  # noqa: S314 - written by pytest a moment ago
        name = case.attrib["name"].partition("[")[0]
        steps.setdefault(name, []).extend(found.text or found.tag for found in case)
    return steps
