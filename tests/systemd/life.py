"""Life of the service in a real systemd, from installation to removal; started by tests/deploy/test_systemd.py.

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
from zipfile import ZipFile

import pytest
from installed_service import (
    CONFIG,
    DROP_INS,
    STATE,
    URL,
    add_drop_in,
    is_active,
    load_mock_driver,
    main_pid,
    read_gpus_up,
    read_journal,
    read_property,
    read_samples,
    run_process,
)
from services import fetch, wait_until

from mock_nvml import MockNvml

SHARED = Path(os.environ["SHARED"])
INSTALL = SHARED / "checkout/systemd/install.sh"
PREFIX = Path("/opt/gpuwarden")
LINK = Path("/usr/local/bin/gpuwarden")
RECORDS = STATE / "records"
UNIT = Path("/etc/systemd/system/gpuwarden.service")
NOBODY = 65534
# This system has no network: pip finds its packages here.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(SHARED / "wheels"), "PIP_CONFIG_FILE": os.devnull}

# Shorter waits than in production.
QUICK = "[Service]\nWatchdogSec=5\nRestartSec=100ms\n"


def install(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the installer under umask 077: the files that the service's user reads must be readable all the same."""
    return run_process("sh", "-c", 'umask 077; exec "$@"', "sh", INSTALL, *arguments, check=check, env=OFFLINE)


def owners(kind: str) -> set[str]:
    """Return the owners of device memory, of one kind."""
    found = [dict(labels) for labels in read_samples("gpuwarden_owner_gpu_memory_used_bytes")]
    return {labels["owner"] for labels in found if labels["owner_kind"] == kind}


def cgroup(controller: str) -> Path:
    """Return the folder of the service's control group; version 2 has one for all controllers."""
    root = Path("/sys/fs/cgroup")
    each = root / controller
    return (each if each.is_dir() else root) / "system.slice/gpuwarden.service"


@pytest.fixture(scope="module")
def mock() -> MockNvml:
    """Load the mock driver library in the service."""
    return load_mock_driver(SHARED / "mock")


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
    hello = Hello("train", "test", {"GPU:0": sys.argv[1]})
    memory = {"GPU:0": DeviceMemory(current=1 << 30, peak=1 << 30)}
    buckets = (0,) * (len(STEP_BUCKETS) + 1)
    for message in hello, Report("train", 7, 0.0, buckets, memory):
        daemon.send(encode(message))
    sys.stdin.read()
"""


def test_settings_of_the_machine_are_read_only() -> None:
    """This systemd cannot change the kernel of the machine, of which it would raise fs.file-max at its start."""
    assert os.statvfs("/proc/sys").f_flag & os.ST_RDONLY


def test_installed_service_is_running(mock: MockNvml) -> None:
    """The installer returns when the first poll is served, without a network and under any umask."""
    done = install()
    assert "gpuwarden is running: 2 of 2 GPUs up" in done.stdout
    assert LINK.resolve() == (PREFIX / "bin/gpuwarden").resolve()
    assert fetch(f"{URL}/-/ready") == "gpuwarden is ready\n"
    assert is_active()
    assert read_property("UnitFileState") == "enabled"


def test_nothing_is_compiled_at_a_start() -> None:
    """All modules are compiled at installation."""
    (package,) = PREFIX.glob("lib/python3*/site-packages/gpuwarden")
    compiled = {file.name.partition(".")[0] for file in package.glob("__pycache__/*.pyc")}
    assert compiled == {file.stem for file in package.glob("*.py")}


def test_the_driver_is_read_through_the_sandbox() -> None:
    """Both GPUs of the mock library answer, with their readings."""
    assert read_gpus_up() == [1.0, 1.0]
    assert len(read_samples("gpuwarden_gpu_power_usage_watts")) == 2


def test_the_unit_is_sound() -> None:
    """Systemd's own checks find no mistake in the unit, and an exposure of at most 2."""
    done = run_process("systemd-analyze", "verify", "--man=no", UNIT)
    assert done.stderr == ""
    run_process("systemd-analyze", "security", "--offline=true", "--threshold=20", UNIT)


def test_the_daemon_has_no_rights() -> None:
    """The daemon runs as a separate user, has no capability and cannot gain one."""
    status = Path(f"/proc/{main_pid()}/status").read_text()
    facts = dict(re.findall(r"^(Uid|CapBnd|CapEff|CapAmb|NoNewPrivs|Seccomp):\s+(\S+)", status, re.MULTILINE))
    user = pwd.getpwnam("gpuwarden")
    assert int(facts.pop("Uid")) == user.pw_uid != 0
    assert user.pw_shell.endswith("/nologin")
    nothing = "0" * 16
    assert facts == {"CapBnd": nothing, "CapEff": nothing, "CapAmb": nothing, "NoNewPrivs": "1", "Seccomp": "2"}


def test_the_caps_on_memory_and_tasks_are_the_kernels() -> None:
    """The control group has both limits, not only the unit."""
    memory, tasks = cgroup("memory"), cgroup("pids")
    limit = next(memory.glob("memory.limit_in_bytes"), memory / "memory.max")
    assert int(limit.read_text()) == 512 << 20
    assert int((tasks / "pids.max").read_text()) == 512


@pytest.mark.parametrize(("major", "refusal"), [(195, errno.ENXIO), (10, errno.EPERM)], ids=["nvidia", "other"])
def test_only_the_drivers_devices_may_be_opened(tmp_path: Path, major: int, refusal: int) -> None:
    """In the service's control group a device of NVIDIA only lacks its driver; any other is forbidden."""
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
    assert run_process(sys.executable, "-c", opening, check=False).returncode == refusal


def test_only_root_may_pause() -> None:
    """Only root may run `gpuwarden pause`, which releases the driver and shows in systemd's status."""
    gpuwarden = PREFIX / "bin/gpuwarden"
    refused = run_process(gpuwarden, "pause", check=False, user="nobody")
    assert (refused.returncode, "sudo" in refused.stderr) == (1, True)
    assert read_gpus_up() == [1.0, 1.0]
    run_process(gpuwarden, "pause", "--for", "10m")
    assert read_gpus_up() == []
    assert read_property("StatusText").startswith("paused until ")
    assert "2 of 2 GPUs up" in run_process(gpuwarden, "resume").stdout
    assert read_gpus_up() == [1.0, 1.0]


def test_every_user_may_report() -> None:
    """A run of another user has metrics, with the user that the kernel names."""
    uuid = dict(next(iter(read_samples("gpuwarden_gpu_up"))))["uuid"]
    run = subprocess.Popen([PREFIX / "bin/python", "-c", RUN, uuid], stdin=subprocess.PIPE, user="nobody")
    with run:
        wait_until(lambda: read_samples("gpuwarden_run_steps_total"), "the run has metrics")
        info = dict(next(iter(read_samples("gpuwarden_run_info"))))
    assert (info["run_name"], info["uid"], info["pid"]) == ("train", str(NOBODY), str(run.pid))
    assert run.returncode == 0
    wait_until(lambda: list(read_samples("gpuwarden_run_up").values()) == [0.0], "the metrics show the run's end")
    assert stat.S_IMODE(RECORDS.stat().st_mode) == 0o750
    refused = run_process("cat", RECORDS / "runs.db", check=False, user="nobody")
    assert refused.returncode == 1
    details = run_process(PREFIX / "bin/gpuwarden", "runs", "show", info["run_id"], user="nobody").stdout
    assert re.search(rf"^user +nobody \(uid {NOBODY}\)$", details, re.MULTILINE)
    assert re.search(rf"^pid +{run.pid}$", details, re.MULTILINE)


def test_a_run_in_a_container_is_known_by_its_pid_outside() -> None:
    """A run in a pid namespace is identified by its pid on the host."""
    uuid = dict(next(iter(read_samples("gpuwarden_gpu_up"))))["uuid"]
    contained = ["unshare", "--pid", "--fork", str(PREFIX / "bin/python"), "-c", RUN, uuid]
    with subprocess.Popen(contained, stdin=subprocess.PIPE) as outer:
        wait_until(lambda: 1.0 in read_samples("gpuwarden_run_up").values(), "the run has metrics")
        (inside,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert inside in {dict(labels)["pid"] for labels in read_samples("gpuwarden_run_info")}


def test_a_container_started_before_a_restart_reaches_the_next_daemon() -> None:
    """The mount of the socket's folder survives a restart of the daemon."""
    uuid = dict(next(iter(read_samples("gpuwarden_gpu_up"))))["uuid"]
    mounted = 'mount --bind /run/gpuwarden /mnt && echo mounted && read _ && exec "$@"'
    run = [str(PREFIX / "bin/python"), "-c", RUN, uuid, "/mnt/run.sock"]
    contained = ["unshare", "--mount", "sh", "-c", mounted, "sh", *run]
    with subprocess.Popen(contained, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as box:
        assert box.stdin is not None
        assert box.stdout is not None
        assert box.stdout.readline() == "mounted\n"
        run_process("systemctl", "restart", "gpuwarden")
        print(file=box.stdin, flush=True)
        wait_until(
            lambda: str(box.pid) in {dict(each)["pid"] for each in read_samples("gpuwarden_run_info")},
            "the run reports",
        )


def test_processes_of_other_users_are_visible(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """The sandbox does not hide the owners of device memory."""
    mock.processes(0, {process.pid: 1 << 30})
    wait_until(lambda: owners("user") == {"nobody"}, "the process has its user")
    mock.clear()


def test_a_unit_is_an_owner(mock: MockNvml) -> None:
    """A process of a service belongs to that service, by the control group that systemd made for it."""
    run_process("systemd-run", "--unit=train", "--uid=nobody", "sleep", "infinity")
    pid = int(run_process("systemctl", "show", "--value", "--property=MainPID", "train").stdout)
    mock.processes(0, {pid: 1 << 30})
    wait_until(lambda: owners("systemd_unit") == {"train.service"}, "the process is the unit's")
    run_process("systemctl", "stop", "train")
    mock.clear()


def test_one_lost_gpu_is_an_error_in_the_journal(mock: MockNvml) -> None:
    """Log lines have their priority, and one lost GPU out of two does not stop the watchdog heartbeat."""
    pid = main_pid()
    mock.lose(1)
    wait_until(lambda: read_gpus_up() == [1.0, 0.0], "the GPU is down")
    assert "error=gpu_is_lost" in read_journal("--priority=err")
    assert "status page" not in read_journal("--priority=err")
    assert "status page" in read_journal("--priority=info")
    wait_until(lambda: "1 of 2 GPUs up" in read_property("StatusText"), "the status line follows")
    mock.clear()
    wait_until(lambda: read_gpus_up() == [1.0, 1.0], "the GPU is back")
    assert main_pid() == pid


def test_the_watchdog_is_fed() -> None:
    """Polls send heartbeats to systemd."""
    assert read_property("WatchdogUSec") == "30s"
    last = read_property("WatchdogTimestampMonotonic")
    wait_until(lambda: read_property("WatchdogTimestampMonotonic") != last, "the next ping")


def test_a_hung_driver_ends_in_a_restart(mock: MockNvml) -> None:
    """The watchdog aborts a daemon whose driver does not respond, until the driver is back."""
    add_drop_in("quick", QUICK)
    run_process("systemctl", "restart", "gpuwarden")
    pid = main_pid()
    mock.hang("*")
    wait_until(lambda: read_gpus_up() == [0.0, 0.0], "the GPUs are down while they hang")
    wait_until(lambda: "Watchdog timeout" in read_journal(), "the watchdog aborts the daemon")
    wait_until(lambda: main_pid() not in (0, pid), "a new daemon")
    wait_until(is_active, "it serves although the driver still hangs")
    mock.clear()
    wait_until(lambda: read_gpus_up() == [1.0, 1.0], "the GPUs are back")
    assert is_active()
    assert "dumped" not in read_journal()


def test_the_journal_names_the_call_that_hung() -> None:
    """The log has the stack of every thread of the aborted daemon."""
    assert re.search(r'File ".*pynvml.py", line \d+ in nvmlDeviceGet', read_journal())


def test_a_hung_driver_does_not_delay_a_stop(mock: MockNvml) -> None:
    """Threads that hang in the driver do not delay the exit: no timeout, no SIGKILL."""
    mock.hang("*")
    wait_until(lambda: read_gpus_up() == [0.0, 0.0], "the GPUs hang")
    run_process("systemctl", "stop", "gpuwarden")
    assert (read_property("Result"), read_property("ExecMainStatus")) == ("success", "0")
    mock.clear()
    run_process("systemctl", "start", "gpuwarden")
    assert read_gpus_up() == [1.0, 1.0]


def test_a_killed_daemon_comes_back() -> None:
    """A killed daemon leaves nothing that blocks the next one, such as the socket's file."""
    pid = main_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: main_pid() not in (0, pid) and is_active(), "a new daemon")
    assert read_gpus_up() == [1.0, 1.0]


def wheel() -> Path:
    """Return the built wheel of gpuwarden."""
    (found,) = (SHARED / "wheels").glob("gpuwarden-*.whl")
    return found


def test_an_upgrade_keeps_the_configuration() -> None:
    """After an upgrade from a wheel the service restarts, with the configuration that its operator edited.

    Another program where the link would be stays.
    """
    LINK.unlink()
    LINK.write_text("another program")
    edited, places = re.subn(r"\n  #max_series: .*\n", "\n  max_series: 7\n", CONFIG.read_text())
    assert places == 1
    CONFIG.write_text(edited)
    pid = main_pid()
    done = install(wheel())
    assert "is another program and stays" in done.stderr
    assert LINK.read_text() == "another program"
    LINK.unlink()
    LINK.symlink_to(PREFIX / "bin/gpuwarden")
    assert CONFIG.read_text() == edited
    assert main_pid() != pid
    assert read_gpus_up() == [1.0, 1.0]


def test_a_failed_upgrade_changes_nothing(tmp_path: Path) -> None:
    """A wheel that cannot be installed changes neither the running service nor its files."""
    pid = main_pid()
    broken = tmp_path / "gpuwarden-9-py3-none-any.whl"
    broken.write_text("no wheel")
    done = install(broken, check=False)
    assert done.returncode == 1
    assert "the previous version is restored" in done.stderr
    assert main_pid() == pid
    assert run_process(LINK, "--version").stdout.startswith("gpuwarden ")
    assert not PREFIX.with_suffix(".old").exists()


def test_an_upgrade_that_refuses_the_configuration_changes_nothing() -> None:
    """The installer shows the new version's error, and the running daemon keeps the configuration it has read."""
    pid, right = main_pid(), CONFIG.read_text()
    CONFIG.write_text(right + "nonsense: 1\n")
    done = install(wheel(), check=False)
    CONFIG.write_text(right)
    assert done.returncode == 1
    assert re.search(r"config\.yaml:\d+:1: nonsense: ", done.stderr)
    assert main_pid() == pid


def test_an_upgrade_that_does_not_start_is_rolled_back(tmp_path: Path) -> None:
    """A version that installs, but whose daemon ends at the start, gives way to the one that ran, with its unit."""
    marked, version = UNIT.read_text() + "# of the version that runs\n", PREFIX / "installed-first"
    UNIT.write_text(marked)
    version.touch()
    broken = tmp_path / wheel().name
    with ZipFile(wheel()) as right, ZipFile(broken, "w") as wrong:
        for name in right.namelist():
            ends = name == "gpuwarden/cli/commands/serve_command.py"
            wrong.writestr(name, "raise SystemExit('broken')\n" if ends else right.read(name))
    pid = main_pid()
    done = install(broken, check=False)
    assert done.returncode == 1
    assert re.search(r"broken\n(.*\n)*.*the new version does not start; see its last log lines above", done.stderr)
    assert "the previous version is restored" in done.stderr
    assert (UNIT.read_text(), version.exists(), PREFIX.with_suffix(".old").exists()) == (marked, True, False)
    assert is_active()
    assert main_pid() != pid
    assert read_gpus_up() == [1.0, 1.0]


def test_wrong_configuration_fails_without_restarts() -> None:
    """The service stays down until the configuration is corrected; the log names the mistake and its line."""
    right = CONFIG.read_text()
    CONFIG.write_text(right + "nonsense: 1\n")
    assert run_process("systemctl", "restart", "gpuwarden", check=False).returncode != 0
    assert (read_property("ActiveState"), read_property("ExecMainStatus"), read_property("NRestarts")) == (
        "failed",
        "2",
        "0",
    )
    assert re.search(r"config\.yaml:\d+:1: nonsense: ", read_journal("--lines=20"))
    CONFIG.write_text(right)
    run_process("systemctl", "restart", "gpuwarden")
    assert is_active()


def test_reload_applies_or_refuses_the_configuration() -> None:
    """A reload applies a valid change in the same process; an invalid one changes nothing."""
    right, pid = CONFIG.read_text(), main_pid()
    CONFIG.write_text(re.sub(r"\n  #level: .*\n", "\n  level: debug\n", right))
    run_process("systemctl", "reload", "gpuwarden")
    wait_until(lambda: "configuration reloaded applied=log.level" in read_journal("--lines=50"), "the reload")
    CONFIG.write_text(right + "\nnonsense: 1\n")
    assert run_process("systemctl", "reload", "gpuwarden", check=False).returncode != 0
    assert re.search(r"config\.yaml:\d+:1: nonsense: ", read_journal("--lines=20"))
    CONFIG.write_text(right)
    run_process("systemctl", "reload", "gpuwarden")
    assert (main_pid(), is_active()) == (pid, True)


def test_a_taken_port_is_waited_for() -> None:
    """Attempts have no limit: the service starts as soon as the other program frees the port."""
    run_process("systemctl", "stop", "gpuwarden")
    with socket.create_server(("127.0.0.1", 9846)):
        run_process("systemctl", "start", "gpuwarden", check=False)
        wait_until(lambda: int(read_property("NRestarts")) > 6, "more attempts than systemd allows by default")
        assert "another program has this port" in read_journal("--lines=50")
    wait_until(is_active, "the service runs")


def test_a_host_that_hides_processes_does_not_hide_them_here(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """The service has a private /proc, so hidepid= on the host does not hide the owners."""
    mock.processes(0, {process.pid: 1 << 30})
    run_process("mount", "-o", "remount,hidepid=invisible", "/proc")
    run_process("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"nobody"}


def test_the_documented_drop_in_sees_hidden_processes(mock: MockNvml, process: subprocess.Popen[bytes]) -> None:
    """The capability in docs/start/install.md identifies owners although /proc hides other users' processes."""
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\n[^`]*CAP_SYS_PTRACE[^`]*)```", text)
    mock.processes(0, {process.pid: 1 << 30})
    add_drop_in("hidden", "[Service]\nProtectProc=invisible\n")
    run_process("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"unknown"}
    add_drop_in("capability", documented)
    run_process("systemctl", "restart", "gpuwarden")
    assert owners("user") == {"nobody"}


def test_the_documented_drop_in_reaches_docker() -> None:
    """The service reports that it may not use Docker's socket; with the group in docs/start/install.md it may."""
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\nSupplementaryGroups=docker\n)```", text)
    run_process("groupadd", "--force", "docker")
    access = (("source", "docker"),)
    with socket.socket(socket.AF_UNIX) as docker:
        docker.bind("/run/docker.sock")
        run_process("chgrp", "docker", "/run/docker.sock")
        run_process("chmod", "0660", "/run/docker.sock")
        run_process("systemctl", "restart", "gpuwarden")
        assert read_samples("gpuwarden_access")[access] == 0
        add_drop_in("docker", documented)
        run_process("systemctl", "restart", "gpuwarden")
        assert read_samples("gpuwarden_access")[access] == 1
    Path("/run/docker.sock").unlink()


def test_the_documented_drop_in_reads_the_kernel_log(mock: MockNvml) -> None:
    """The service reports that it may not read the kernel log; with the drop-in in docs/start/install.md it may."""
    os.mknod("/dev/kmsg", stat.S_IFCHR | 0o644, os.makedev(1, 11))
    restricted = int(Path("/proc/sys/kernel/dmesg_restrict").read_text())  # if 0, no capability is needed
    text = (SHARED / "install.md").read_text()
    (documented,) = re.findall(r"```ini\n(\[Service\]\n[^`]*CAP_SYSLOG[^`]*)```", text)
    access = (("source", "kernel_log"),)
    run_process("systemctl", "restart", "gpuwarden")
    assert read_samples("gpuwarden_access")[access] == 0
    add_drop_in("kernel-log", documented)
    run_process("systemctl", "restart", "gpuwarden")
    assert read_samples("gpuwarden_access")[access] == 1
    assert len(read_gpus_up()) == 2
    for line in documented.split("\n")[1:-1]:
        if "CAP_" in line and not restricted:
            continue
        add_drop_in("kernel-log", documented.replace(line, ""))
        run_process("systemctl", "restart", "gpuwarden")
        assert read_samples("gpuwarden_access")[access] == 0, f"{line} is not needed"


def test_a_stopped_service_leaves_nothing() -> None:
    """A stop is a success; of the sockets only the folder remains, for containers that have it mounted."""
    run_process("systemctl", "stop", "gpuwarden")
    assert (read_property("ActiveState"), read_property("Result"), read_property("ExecMainStatus")) == (
        "inactive",
        "success",
        "0",
    )
    assert list(Path("/run/gpuwarden").iterdir()) == []
    run_process("systemctl", "start", "gpuwarden")


def test_removal_keeps_the_configuration() -> None:
    """Uninstalling removes the service and keeps its configuration."""
    done = install("--uninstall")
    assert "/etc/gpuwarden and /var/lib/gpuwarden are kept" in done.stdout
    assert run_process("systemctl", "cat", "gpuwarden", check=False).returncode != 0
    assert not UNIT.exists()
    assert not list(UNIT.parent.glob("*.wants/gpuwarden*"))
    assert not PREFIX.exists()
    assert not LINK.is_symlink()
    assert not Path("/run/gpuwarden").exists()
    assert fetch(f"{URL}/-/healthy") == ""
    assert CONFIG.exists()
    assert list(RECORDS.iterdir())


def test_a_purge_removes_everything() -> None:
    """A purge after an uninstall removes what the uninstall kept."""
    install("--uninstall", "--purge")
    assert not CONFIG.parent.exists()
    assert not DROP_INS.exists()
    assert not STATE.exists()
    assert run_process("getent", "passwd", "gpuwarden", check=False).returncode != 0


def test_only_root_installs() -> None:
    """Without root the installer fails with what to do, and changes nothing."""
    script = Path("/opt/install.sh")  # that user can read it here
    script.write_bytes(INSTALL.read_bytes())
    script.chmod(0o755)
    done = run_process(script, check=False, user="nobody")
    assert done.returncode == 1
    assert "must run as root" in done.stderr


def test_an_interpreter_at_home_is_refused() -> None:
    """The service cannot read home directories: a Python in one is refused before anything changes."""
    home = Path("/home/someone/python")
    (home / "bin").mkdir(parents=True)
    system = Path("/usr/bin/python3").resolve()
    (home / "bin/python3").write_bytes(system.read_bytes())
    (home / "bin/python3").chmod(0o755)
    (home / "lib").mkdir()
    (home / "lib" / system.name).symlink_to(f"/usr/lib/{system.name}")
    done = run_process("env", f"PYTHON={home}/bin/python3", INSTALL, check=False)
    assert done.returncode == 1
    assert "which the service cannot read" in done.stderr
    assert not PREFIX.exists()
