"""One life of the service inside a real systemd, from installation to removal; started by tests/deploy/test_systemd.py.

The tests build on each other, in their order. They run as root in a system that is thrown away (boot.sh).
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from services import fetch, until

from mock_nvml import MockNvml

SHARED = Path(os.environ["SHARED"])
INSTALL = SHARED / "checkout/systemd/install.sh"
PREFIX = Path("/opt/gpuwarden")
CONFIG = Path("/etc/gpuwarden/config.yaml")
STATE = Path("/var/lib/gpuwarden")
RECEIPTS = STATE / "receipts"
UNIT = Path("/etc/systemd/system/gpuwarden.service")
DROP_INS = Path("/etc/systemd/system/gpuwarden.service.d")
URL = "http://127.0.0.1:9846"
NOBODY = 65534
# The network of this system leads nowhere: what pip installs lies there already.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(SHARED / "wheels"), "PIP_CONFIG_FILE": os.devnull}

# The waits of a real life, shortened to those of a test.
QUICK = "[Service]\nWatchdogSec=5\nRestartSec=100ms\n"


def command(*words: str | Path, check: bool = True, user: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; by default a failure fails the test, with what it wrote."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, user=user, env={**os.environ, **OFFLINE}, timeout=120
    )
    assert not check or done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def install(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the installer as a careful root does, whose umask must not reach what the service's user has to read."""
    return command("sh", "-c", 'umask 077; exec "$@"', "sh", INSTALL, *arguments, check=check)


def shown(name: str) -> str:
    """Return a property of the service, as systemd has it now."""
    return command("systemctl", "show", "--value", "--property", name, "gpuwarden").stdout.strip()


def is_active() -> bool:
    """Return whether the service has said that it is ready."""
    return shown("ActiveState") == "active"


def main_pid() -> int:
    """Return the daemon's pid; 0 between two of them."""
    return int(shown("MainPID"))


def journal(*options: str) -> str:
    """Return the service's lines and systemd's about it."""
    return command("journalctl", "--unit", "gpuwarden", "--output", "cat", "--no-pager", *options).stdout


def drop_in(name: str, text: str) -> None:
    """Change the service as its user would."""
    DROP_INS.mkdir(exist_ok=True)
    (DROP_INS / f"{name}.conf").write_text(text)
    command("systemctl", "daemon-reload")


def samples(name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of that name by their sorted labels; empty while the daemon does not answer."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetch(f"{URL}/metrics"))
        for sample in family.samples
        if sample.name == name
    }


def gpus_up() -> list[float]:
    """Return gpuwarden_gpu_up of each GPU."""
    return list(samples("gpuwarden_gpu_up").values())


def owners(kind: str) -> set[str]:
    """Return who holds device memory, of one kind of owner."""
    found = [dict(labels) for labels in samples("gpuwarden_owner_gpu_memory_used_bytes")]
    return {labels["owner"] for labels in found if labels["owner_kind"] == kind}


def cgroup(controller: str) -> Path:
    """Return the folder of the service's control group; version 2 has one for all controllers."""
    root = Path("/sys/fs/cgroup")
    each = root / controller
    return (each if each.is_dir() else root) / "system.slice/gpuwarden.service"


@pytest.fixture(scope="module")
def mock() -> MockNvml:
    """Give the service the mock driver library, as a drop-in."""
    directory = Path("/run/mock-nvml")
    directory.mkdir()
    # Outside /tmp, which is the service's own.
    library = Path("/opt/mock-nvml")
    library.mkdir()
    for file in (SHARED / "mock").iterdir():
        (library / file.name).write_bytes(file.read_bytes())
    mock = MockNvml(library, directory)
    settings = mock.env(gpus=2)
    del settings["MOCK_NVML_COUNTERS"]  # a file, which the service may not write
    drop_in("mock", "[Service]\n" + "".join(f"Environment={name}={value}\n" for name, value in settings.items()))
    return mock


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of another user than the service's."""
    with subprocess.Popen(["sleep", "infinity"], user="nobody") as process:
        yield process
        process.kill()


RUN = """
import socket, sys
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
    daemon.connect(sys.argv[2] if len(sys.argv) > 2 else "/run/gpuwarden/run.sock")
    hello = Hello("of nobody", "test", {"GPU:0": sys.argv[1]})
    memory = {"GPU:0": DeviceMemory(current=1 << 30, peak=1 << 30)}
    buckets = (0,) * (len(STEP_BUCKETS) + 1)
    for message in hello, Report("train", 7, 0.0, buckets, memory):
        daemon.send(encode(message))
    sys.stdin.read()
"""


def test_the_service_runs_once_it_is_installed(mock: MockNvml) -> None:
    """The installer ends when the first poll is served, without a network and under any umask."""
    done = install()
    assert "gpuwarden is running: 2 of 2 GPUs up" in done.stdout
    assert fetch(f"{URL}/-/ready") == "gpuwarden is ready\n"
    assert is_active()
    assert shown("UnitFileState") == "enabled"


def test_nothing_is_compiled_at_a_start() -> None:
    """Its modules were compiled at installation."""
    (package,) = PREFIX.glob("lib/python3*/site-packages/gpuwarden")
    compiled = {file.name.partition(".")[0] for file in package.glob("__pycache__/*.pyc")}
    assert compiled == {file.stem for file in package.glob("*.py")}


def test_the_driver_is_read_through_the_sandbox() -> None:
    """Both GPUs of the mock library answer, with their readings."""
    assert gpus_up() == [1.0, 1.0]
    assert len(samples("gpuwarden_gpu_power_usage_watts")) == 2


def test_the_unit_is_sound() -> None:
    """Systemd's own checks find no mistake in the unit, and an exposure of 2 at most."""
    done = command("systemd-analyze", "verify", "--man=no", UNIT)
    assert done.stderr == ""
    command("systemd-analyze", "security", "--offline=true", "--threshold=20", UNIT)


def test_the_daemon_has_no_rights() -> None:
    """It runs as a user of its own, with no capability, and gains none."""
    status = Path(f"/proc/{main_pid()}/status").read_text()
    facts = dict(re.findall(r"^(Uid|CapBnd|CapEff|CapAmb|NoNewPrivs|Seccomp):\s+(\S+)", status, re.MULTILINE))
    user = pwd.getpwnam("gpuwarden")
    assert int(facts.pop("Uid")) == user.pw_uid != 0
    assert user.pw_shell.endswith("/nologin")
    nothing = "0" * 16
    assert facts == {"CapBnd": nothing, "CapEff": nothing, "CapAmb": nothing, "NoNewPrivs": "1", "Seccomp": "2"}


def test_the_caps_on_memory_and_tasks_are_the_kernels() -> None:
    """Both stand in the control group, not in the unit alone."""
    memory, tasks = cgroup("memory"), cgroup("pids")
    limit = next(memory.glob("memory.limit_in_bytes"), memory / "memory.max")
    assert int(limit.read_text()) == 512 << 20
    assert int((tasks / "pids.max").read_text()) == 512


@pytest.mark.parametrize(("major", "refusal"), [(195, errno.ENXIO), (10, errno.EPERM)], ids=["nvidia", "other"])
def test_only_the_drivers_devices_may_be_opened(tmp_path: Path, major: int, refusal: int) -> None:
    """In the service's control group a device of NVIDIA's lacks only its driver; any other is forbidden."""
    device = Path(f"/dev/some-{major}")
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(major, 200))
    opening = f"""
import os, sys
open("{cgroup("devices")}/cgroup.procs", "w").write(str(os.getpid()))
try:
    os.open("{device}", os.O_RDWR)
except OSError as error:
    sys.exit(error.errno)
"""
    assert command(sys.executable, "-c", opening, check=False).returncode == refusal


def test_root_alone_may_pause() -> None:
    """`gpuwarden pause` is for root: it releases the driver inside the sandbox, and systemd's status says so."""
    gpuwarden = PREFIX / "bin/gpuwarden"
    refused = command(gpuwarden, "pause", check=False, user="nobody")
    assert (refused.returncode, "try sudo" in refused.stderr) == (1, True)
    assert gpus_up() == [1.0, 1.0]
    command(gpuwarden, "pause", "--for", "10m")
    assert gpus_up() == []
    assert shown("StatusText").startswith("paused until ")
    assert "2 of 2 GPUs up" in command(gpuwarden, "resume").stdout
    assert gpus_up() == [1.0, 1.0]


def test_every_user_may_report() -> None:
    """A run of another user appears on the page under the kernel's word for that user."""
    uuid = dict(next(iter(samples("gpuwarden_gpu_up"))))["uuid"]
    run = subprocess.Popen([PREFIX / "bin/python", "-c", RUN, uuid], stdin=subprocess.PIPE, user="nobody")
    with run:
        until(lambda: samples("gpuwarden_run_steps_total"), "the run is on the page")
        info = dict(next(iter(samples("gpuwarden_run_info"))))
    assert (info["run_name"], info["uid"], info["pid"]) == ("of nobody", str(NOBODY), str(run.pid))
    assert run.returncode == 0
    until(lambda: list(samples("gpuwarden_run_up").values()) == [0.0], "the run's end is on the page")
    assert stat.S_IMODE(RECEIPTS.stat().st_mode) == 0o750
    refused = command("cat", RECEIPTS / "runs.db", check=False, user="nobody")
    assert refused.returncode == 1
    shown_to_all = command(PREFIX / "bin/gpuwarden", "runs", "show", info["run_id"], user="nobody").stdout
    assert f"pid {run.pid} of nobody (uid {NOBODY})" in shown_to_all


def test_a_run_in_a_container_is_known_by_its_pid_outside() -> None:
    """A pid namespace of the run's own does not hide which process it is."""
    uuid = dict(next(iter(samples("gpuwarden_gpu_up"))))["uuid"]
    contained = ["unshare", "--pid", "--fork", str(PREFIX / "bin/python"), "-c", RUN, uuid]
    with subprocess.Popen(contained, stdin=subprocess.PIPE) as outer:
        until(lambda: 1.0 in samples("gpuwarden_run_up").values(), "the run is on the page")
        (inside,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert inside in {dict(labels)["pid"] for labels in samples("gpuwarden_run_info")}


def test_a_container_started_before_a_restart_reaches_the_next_daemon() -> None:
    """A mount of the socket's folder outlives the daemon whose folder it was."""
    uuid = dict(next(iter(samples("gpuwarden_gpu_up"))))["uuid"]
    mounted = 'mount --bind /run/gpuwarden /mnt && echo mounted && read _ && exec "$@"'
    run = [str(PREFIX / "bin/python"), "-c", RUN, uuid, "/mnt/run.sock"]
    contained = ["unshare", "--mount", "sh", "-c", mounted, "sh", *run]
    with subprocess.Popen(contained, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as box:
        assert box.stdin is not None
        assert box.stdout is not None
        assert box.stdout.readline() == "mounted\n"
        command("systemctl", "restart", "gpuwarden")
        print(file=box.stdin, flush=True)
        until(lambda: str(box.pid) in {dict(each)["pid"] for each in samples("gpuwarden_run_info")}, "the run reports")


def test_processes_of_others_are_seen(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """The sandbox does not hide who holds device memory."""
    mock.processes(0, {process.pid: 1 << 30})
    until(lambda: owners("user") == {"nobody"}, "the process is nobody's")
    mock.clear()


def test_a_unit_is_an_owner(mock: MockNvml) -> None:
    """A process of a service counts as the service's, by the control group that systemd made for it."""
    command("systemd-run", "--unit=train", "--uid=nobody", "sleep", "infinity")
    pid = int(command("systemctl", "show", "--value", "--property=MainPID", "train").stdout)
    mock.processes(0, {pid: 1 << 30})
    until(lambda: owners("systemd_unit") == {"train.service"}, "the process is the unit's")
    command("systemctl", "stop", "train")
    mock.clear()


def test_one_lost_gpu_is_an_error_in_the_journal(mock: MockNvml) -> None:
    """Lines carry their priority, and one GPU out of two does not stop the watchdog's ping."""
    pid = main_pid()
    mock.lose(1)
    until(lambda: gpus_up() == [1.0, 0.0], "the GPU is down")
    assert "error=gpu_is_lost" in journal("--priority=err")
    assert "status page" not in journal("--priority=err")
    assert "status page" in journal("--priority=info")
    until(lambda: "1 of 2 GPUs up" in shown("StatusText"), "the status line follows")
    mock.clear()
    until(lambda: gpus_up() == [1.0, 1.0], "the GPU is back")
    assert main_pid() == pid


def test_the_watchdog_is_fed() -> None:
    """Polls reach systemd as pings."""
    assert shown("WatchdogUSec") == "30s"
    last = shown("WatchdogTimestampMonotonic")
    until(lambda: shown("WatchdogTimestampMonotonic") != last, "the next ping")


def test_a_hung_driver_ends_in_a_restart(mock: MockNvml) -> None:
    """The watchdog follows the driver's answers: it aborts a daemon that gets none, until the driver is back."""
    drop_in("quick", QUICK)
    command("systemctl", "restart", "gpuwarden")
    pid = main_pid()
    mock.hang("*")
    until(lambda: gpus_up() == [0.0, 0.0], "the GPUs are down while they hang")
    until(lambda: "Watchdog timeout" in journal(), "the watchdog bites")
    until(lambda: main_pid() not in (0, pid), "a new daemon")
    until(is_active, "it serves although the driver still hangs")
    mock.clear()
    until(lambda: gpus_up() == [1.0, 1.0], "the GPUs are back")
    assert is_active()
    assert "dumped" not in journal()


def test_the_journal_names_the_call_that_hung() -> None:
    """The aborted daemon left the stack of every thread."""
    assert re.search(r'File ".*pynvml.py", line \d+ in nvmlDeviceGet', journal())


def test_a_hung_driver_does_not_delay_a_stop(mock: MockNvml) -> None:
    """Threads in the driver do not keep the process: no timeout, no SIGKILL."""
    mock.hang("*")
    until(lambda: gpus_up() == [0.0, 0.0], "the GPUs hang")
    command("systemctl", "stop", "gpuwarden")
    assert (shown("Result"), shown("ExecMainStatus")) == ("success", "0")
    mock.clear()
    command("systemctl", "start", "gpuwarden")
    assert gpus_up() == [1.0, 1.0]


def test_a_killed_daemon_comes_back() -> None:
    """Nothing that a kill leaves behind is in the way of the next one, the socket's file included."""
    pid = main_pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: main_pid() not in (0, pid) and is_active(), "a new daemon")
    assert gpus_up() == [1.0, 1.0]


def wheel() -> Path:
    """Return the built gpuwarden."""
    (found,) = (SHARED / "wheels").glob("gpuwarden-*.whl")
    return found


def test_an_upgrade_keeps_the_configuration() -> None:
    """Installed a second time, from a wheel, the service restarts with the file its user has edited."""
    edited, places = re.subn(r"\n  #max_series: .*\n", "\n  max_series: 7\n", CONFIG.read_text())
    assert places == 1
    CONFIG.write_text(edited)
    pid = main_pid()
    install(wheel())
    assert CONFIG.read_text() == edited
    assert main_pid() != pid
    assert gpus_up() == [1.0, 1.0]


def test_a_failed_upgrade_changes_nothing(tmp_path: Path) -> None:
    """A wheel that cannot be installed leaves the running service and its files alone."""
    pid = main_pid()
    broken = tmp_path / "gpuwarden-9-py3-none-any.whl"
    broken.write_text("no wheel")
    done = install(broken, check=False)
    assert done.returncode == 1
    assert "the previous version is restored" in done.stderr
    assert main_pid() == pid
    assert command(PREFIX / "bin/gpuwarden", "--version").stdout.startswith("gpuwarden ")
    assert not PREFIX.with_suffix(".old").exists()


def test_an_upgrade_that_refuses_the_configuration_changes_nothing() -> None:
    """The new version's complaint is shown, and the running one goes on with what it has read."""
    pid, right = main_pid(), CONFIG.read_text()
    CONFIG.write_text(right + "nonsense: 1\n")
    done = install(wheel(), check=False)
    CONFIG.write_text(right)
    assert done.returncode == 1
    assert re.search(r"config\.yaml:\d+:1: nonsense: ", done.stderr)
    assert main_pid() == pid


def test_a_wrong_configuration_is_told_once() -> None:
    """The service stays down, with the mistake and its line in the journal, until it is corrected."""
    right = CONFIG.read_text()
    CONFIG.write_text(right + "nonsense: 1\n")
    assert command("systemctl", "restart", "gpuwarden", check=False).returncode != 0
    assert (shown("ActiveState"), shown("ExecMainStatus"), shown("NRestarts")) == ("failed", "2", "0")
    assert re.search(r"config\.yaml:\d+:1: nonsense: ", journal("--lines=20"))
    CONFIG.write_text(right)
    command("systemctl", "restart", "gpuwarden")
    assert is_active()


def test_a_taken_port_is_waited_for() -> None:
    """Attempts have no end: the service runs as soon as the other program leaves the port."""
    command("systemctl", "stop", "gpuwarden")
    with socket.create_server(("127.0.0.1", 9846)):
        command("systemctl", "start", "gpuwarden", check=False)
        until(lambda: int(shown("NRestarts")) > 6, "more attempts than systemd allows by default")
        assert "another program has this port" in journal("--lines=50")
    until(is_active, "the service runs")


def test_a_host_that_hides_processes_does_not_hide_them_here(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """The service has a /proc of its own, so that hidepid= on the host's leaves the page its names."""
    mock.processes(0, {process.pid: 1 << 30})
    command("mount", "-o", "remount,hidepid=invisible", "/proc")
    command("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"nobody"}


def test_the_documented_drop_in_sees_hidden_processes(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """Where /proc hides others' processes from the service too, the capability in docs/start/install.md names them."""
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\n[^`]*CAP_SYS_PTRACE[^`]*)```", text)
    mock.processes(0, {process.pid: 1 << 30})
    drop_in("hidden", "[Service]\nProtectProc=invisible\n")
    command("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"unknown"}
    drop_in("capability", documented)
    command("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"nobody"}


def test_the_documented_drop_in_reaches_docker() -> None:
    """Docker's socket is closed to the service, which says so, and open with the group in docs/start/install.md."""
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\nSupplementaryGroups=docker\n)```", text)
    command("groupadd", "--force", "docker")
    access = (("source", "docker"),)
    with socket.socket(socket.AF_UNIX) as docker:
        docker.bind("/run/docker.sock")
        command("chgrp", "docker", "/run/docker.sock")
        command("chmod", "0660", "/run/docker.sock")
        command("systemctl", "restart", "gpuwarden")
        assert samples("gpuwarden_access")[access] == 0
        drop_in("docker", documented)
        command("systemctl", "restart", "gpuwarden")
        assert samples("gpuwarden_access")[access] == 1
    Path("/run/docker.sock").unlink()


def test_the_documented_drop_in_reads_the_kernel_log(mock: MockNvml) -> None:
    """The strict unit may not read the kernel log, and says so; with the drop-in in docs/start/install.md it does."""
    os.mknod("/dev/kmsg", stat.S_IFCHR | 0o644, os.makedev(1, 11))
    restricted = int(Path("/proc/sys/kernel/dmesg_restrict").read_text())  # else it needs no capability
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\n[^`]*CAP_SYSLOG[^`]*)```", text)
    access = (("source", "kernel_log"),)
    command("systemctl", "restart", "gpuwarden")
    assert samples("gpuwarden_access")[access] == 0
    drop_in("kernel-log", documented)
    command("systemctl", "restart", "gpuwarden")
    assert samples("gpuwarden_access")[access] == 1
    assert len(gpus_up()) == 2
    for line in documented.split("\n")[1:-1]:
        if "CAP_" in line and not restricted:
            continue
        drop_in("kernel-log", documented.replace(line, ""))
        command("systemctl", "restart", "gpuwarden")
        assert samples("gpuwarden_access")[access] == 0, f"{line} is not needed"


def test_a_stopped_service_leaves_nothing() -> None:
    """A stop is a success; of the sockets only the folder stays, for containers that have it mounted."""
    command("systemctl", "stop", "gpuwarden")
    assert (shown("ActiveState"), shown("Result"), shown("ExecMainStatus")) == ("inactive", "success", "0")
    assert list(Path("/run/gpuwarden").iterdir()) == []
    command("systemctl", "start", "gpuwarden")


def test_removal_keeps_the_configuration() -> None:
    """Uninstalled, the service is gone; its configuration waits for a return."""
    done = install("--uninstall")
    assert "/etc/gpuwarden and /var/lib/gpuwarden are kept" in done.stdout
    assert command("systemctl", "cat", "gpuwarden", check=False).returncode != 0
    assert not UNIT.exists()
    assert not list(UNIT.parent.glob("*.wants/gpuwarden*"))
    assert not PREFIX.exists()
    assert not Path("/run/gpuwarden").exists()
    assert fetch(f"{URL}/-/healthy") == ""
    assert CONFIG.exists()
    assert list(RECEIPTS.iterdir())


def test_a_purge_removes_everything() -> None:
    """It works when the service is gone already, and takes what removal kept."""
    install("--uninstall", "--purge")
    assert not CONFIG.parent.exists()
    assert not DROP_INS.exists()
    assert not STATE.exists()
    assert command("getent", "passwd", "gpuwarden", check=False).returncode != 0


def test_only_root_installs() -> None:
    """Another user is told what to do, before anything changes."""
    script = Path("/opt/install.sh")  # where that user can read it
    script.write_bytes(INSTALL.read_bytes())
    script.chmod(0o755)
    done = command(script, check=False, user="nobody")
    assert done.returncode == 1
    assert "must run as root" in done.stderr


def test_an_interpreter_at_home_is_refused() -> None:
    """The service cannot read homes, so a Python in one is refused before anything changes."""
    home = Path("/home/someone/python")
    (home / "bin").mkdir(parents=True)
    system = Path("/usr/bin/python3").resolve()
    (home / "bin/python3").write_bytes(system.read_bytes())
    (home / "bin/python3").chmod(0o755)
    (home / "lib").mkdir()
    (home / "lib" / system.name).symlink_to(f"/usr/lib/{system.name}")
    done = command("env", f"PYTHON={home}/bin/python3", INSTALL, check=False)
    assert done.returncode == 1
    assert "which the service cannot read" in done.stderr
    assert not PREFIX.exists()
