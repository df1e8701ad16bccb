"""Life of the Debian package in a real systemd, from installation to purge; started by tests/deploy/test_deb.py.

The tests build on each other, in their order. They run as root in a system that is thrown away (boot.sh).
"""

from __future__ import annotations

import os
import pwd
import re
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest
from installed_service import (
    CONFIG,
    DROP_INS,
    STATE,
    URL,
    is_active,
    load_mock_driver,
    main_pid,
    read_gpus_up,
    read_journal,
    read_property,
    run_process,
)
from services import fetch, wait_until

from mock_nvml import MockNvml

SHARED = Path(os.environ["SHARED"])
PROGRAM = Path("/usr/share/gpuwarden")
# bcrypt of "correct horse", at the lowest cost
LOGIN = "basic_auth_users: {operator: $2b$04$49vwsoLBd8wFxu8CX/U7c.dYDK7GXE7333R4NkK3UX23gRu4ZiDl2}\n"


def apt(*words: str | Path) -> str:
    """Run apt-get, which answers its questions by their defaults; return its output."""
    options = ["--yes", "--quiet", "--option", "Dpkg::Options::=--force-confdef"]
    return run_process("apt-get", *options, *words, env={"DEBIAN_FRONTEND": "noninteractive"}).stdout


def edit(option: str, value: str) -> None:
    """Set an option that the configuration has as a comment."""
    edited, places = re.subn(rf"\n  #{option}: .*\n", f"\n  {option}: {value}\n", CONFIG.read_text())
    assert places == 1
    CONFIG.write_text(edited)


@pytest.fixture(scope="module", autouse=True)
def mock() -> MockNvml:
    """Load the mock driver library in the service, let systemd find the package's unit, and let packages start it."""
    Path("/opt/throwaway/gpuwarden.service").symlink_to("/usr/lib/systemd/system/gpuwarden.service")
    Path("/usr/sbin/policy-rc.d").unlink(missing_ok=True)
    return load_mock_driver(SHARED / "mock")


def test_the_service_runs_after_the_installation() -> None:
    """The last line of the installation says that the service runs, and what next."""
    (built,) = SHARED.glob("gpuwarden_*_all.deb")
    lines = [line for line in apt("install", built).splitlines() if line.startswith("gpuwarden ")]
    assert lines[-1:] == [
        "gpuwarden is running: 2 of 2 GPUs up, 0 runs reporting. Next: gpuwarden top, or http://127.0.0.1:9846/"
    ]
    assert (is_active(), read_property("UnitFileState")) == (True, "enabled")
    assert fetch(f"{URL}/-/ready") == "gpuwarden is ready\n"
    assert read_gpus_up() == [1.0, 1.0]
    assert pwd.getpwnam("gpuwarden").pw_shell.endswith("/nologin")


def test_the_daemon_runs_on_the_packages_of_debian() -> None:
    """Every module is the package's own or Debian's."""
    lines = (
        "import sys",
        "sys.path.insert(0, '/usr/share/gpuwarden')",
        "import bcrypt, gpuwarden, h11, packaging, psutil, pynvml, rich, shtab, yaml",
        "print(*(each.__file__ for each in sys.modules.values() if getattr(each, '__file__', None)))",
    )
    files = run_process("/usr/bin/python3", "-c", "; ".join(lines), env={"PYTHONPATH": ""}).stdout.split()
    assert [each for each in files if not each.startswith(("/usr/share/gpuwarden/", "/usr/lib/python3"))] == []


@pytest.mark.parametrize("words", ["--version", "check", "runs", "completion bash"])
def test_commands_run(words: str) -> None:
    """The program finds its modules and the daemon."""
    assert run_process("gpuwarden", *words.split()).stdout


def test_a_run_without_the_service_has_a_daemon_of_its_own(mock: MockNvml) -> None:
    """`gpuwarden run` starts a private daemon, which finds the package's modules too."""
    run_process("systemctl", "stop", "gpuwarden")
    settings = mock.env(gpus=2)
    del settings["MOCK_NVML_COUNTERS"]
    done = run_process("gpuwarden", "run", "/usr/bin/python3", "-c", "pass", env=settings)
    run_process("systemctl", "start", "gpuwarden")
    assert "daemon" not in done.stderr


def test_logins_work_with_the_bcrypt_of_debian() -> None:
    """A password is checked, and a wrong one refused."""
    before = CONFIG.read_text()
    CONFIG.with_name("web-config.yml").write_text(LOGIN)
    edit("config_file", str(CONFIG.with_name("web-config.yml")))
    assert run_process("systemctl", "restart", "gpuwarden", check=False).returncode == 0, read_journal("--lines=20")
    statuses = []
    for password in ("correct horse", "wrong", "x" * 80, "nul\0"):
        login = b64encode(f"operator:{password}".encode()).decode()
        request = urllib.request.Request(f"{URL}/metrics", headers={"Authorization": f"Basic {login}"})
        try:
            with urllib.request.urlopen(request) as answer:
                statuses.append(answer.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    CONFIG.write_text(before)
    run_process("systemctl", "restart", "gpuwarden")
    assert statuses == [200, 401, 401, 401]


def test_a_reload_applies_the_configuration() -> None:
    """The unit's reload checks the file and signals the daemon."""
    pid = main_pid()
    edit("level", "debug")
    run_process("systemctl", "reload", "gpuwarden")
    wait_until(lambda: "configuration reloaded applied=log.level" in read_journal("--lines=50"), "the reload")
    assert main_pid() == pid


def test_an_upgrade_keeps_a_changed_configuration() -> None:
    """A later version restarts the service, and leaves the operator's file as it is."""
    edited, pid = CONFIG.read_text(), main_pid()
    later = Path("/opt/later")
    run_process("dpkg-deb", "--raw-extract", *SHARED.glob("gpuwarden_*_all.deb"), later)
    control = later / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*", "Version: 999", control.read_text()))
    with (later / "etc/gpuwarden/config.yaml").open("a") as example:
        example.write("\n# An option of a later version\n")
    run_process("dpkg-deb", "--root-owner-group", "--build", later, "/opt/later.deb")
    assert "gpuwarden is running" in apt("install", "/opt/later.deb")
    assert CONFIG.read_text() == edited
    assert "later version" in CONFIG.with_name("config.yaml.dpkg-dist").read_text()
    assert main_pid() not in (0, pid)
    assert read_gpus_up() == [1.0, 1.0]


def test_removal_keeps_configuration_and_state() -> None:
    """The service stops and the program is gone; a new installation goes on where it was."""
    edited = CONFIG.read_text()
    apt("remove", "gpuwarden")
    assert not is_active()
    assert [each for each in (PROGRAM, Path("/usr/bin/gpuwarden"), Path("/run/gpuwarden")) if each.exists()] == []
    assert CONFIG.read_text() == edited
    assert STATE.exists()
    apt("install", "/opt/later.deb")
    assert (is_active(), CONFIG.read_text()) == (True, edited)


def test_purge_leaves_nothing() -> None:
    """No file, no folder, no user."""
    apt("purge", "gpuwarden")
    assert not is_active()
    with pytest.raises(KeyError):
        pwd.getpwnam("gpuwarden")
    places = [PROGRAM, CONFIG.parent, STATE, DROP_INS, Path("/run/gpuwarden"), Path("/usr/share/doc/gpuwarden")]
    assert [each for each in places if each.exists()] == []
    found = run_process("find", "/etc", "/usr", "/var/lib", "-xdev", "-name", "*gpuwarden*").stdout.split()
    assert [
        each for each in found if not each.startswith("/var/lib/containers/")
    ] == []  # images of the machine's podman


def test_a_service_of_the_install_script_is_named() -> None:
    """The package does not install next to systemd/install.sh, whose unit would win."""
    installed = Path("/opt/gpuwarden")
    installed.mkdir()
    (installed / "pyvenv.cfg").touch()
    done = run_process("dpkg", "--install", *SHARED.glob("gpuwarden_*_all.deb"), check=False)
    assert done.returncode != 0
    assert "systemd/install.sh --uninstall" in done.stderr
