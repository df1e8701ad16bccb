"""The daemon that watches a program: the one of this machine, or a private one in a folder of this `gpuwarden run`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.__main__ import isolated_command
from gpuwarden.cli.common.api_client import ApiError, fetch_json
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.launcher.background import running
from gpuwarden.web.api.api_paths import STATE

START_SECONDS = 15.0  # within which a private daemon must answer; its first poll waits for the driver
_PROBE_SECONDS = 2.0
_PREFIX = "gpuwarden-run-"
_MAX_SOCKET_PATH = 107  # bytes, sun_path of unix(7) without its end
_SOCKET_PATTERN = f"/{_PREFIX}????????/run.sock"
_MIN_AGE_SECONDS = 60.0  # of a folder that is removed: one that was just made may not have its lock yet


@dataclass(frozen=True, slots=True)
class DaemonPlace:
    """Place of a daemon: `runs` is the socket that runs report to, `api` the Unix socket or address of its API."""

    runs: Path
    api: Address | Path
    private: bool


@contextlib.contextmanager
def open_daemon(config: Config, folder: Path, complain: Callable[[str], None]) -> Iterator[DaemonPlace | None]:
    """Yield the machine's daemon, or else a private one in `folder`, which ends with the context.

    Blocks until it answers. None if it does not: `complain` gets the reason, and the program runs all the same.
    """
    place = find_daemon(config)
    if place is not None:
        yield place
        return
    with contextlib.ExitStack() as stack:
        log = folder / "daemon.log"
        process = stack.enter_context(running(_command(folder), _environment(folder), log))
        place = _await_answer(process, folder)
        if place is None:
            complain(f"no daemon answers and a private one did not start: {_last_line(log)}")
        yield place


def find_daemon(config: Config) -> DaemonPlace | None:
    """Return the daemon of this configuration, if it takes reports and answers; blocks for some seconds at most."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(str(config.runs.socket))
    except OSError:
        return None
    for api in (config.web_socket, config.web.listen):
        with contextlib.suppress(ApiError):
            fetch_json(api, STATE, _PROBE_SECONDS)
            return DaemonPlace(config.runs.socket, api, private=False)
    return None


def _command(folder: Path) -> list[str]:
    options = ("--source", "nvml", "--listen", "127.0.0.1:0", "--socket", str(folder / "run.sock"))
    return isolated_command("serve", *options)


def _environment(folder: Path) -> dict[str, str]:
    """Return the daemon's environment: no configuration, and a folder for its records as systemd gives it one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")}
    return {**own, "STATE_DIRECTORY": str(folder / "state")}


def _await_answer(process: subprocess.Popen[bytes], folder: Path) -> DaemonPlace | None:
    api = folder / "api.sock"
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if api.exists():
            with contextlib.suppress(ApiError):
                fetch_json(api, STATE)
                return DaemonPlace(folder / "run.sock", api, private=True)
        time.sleep(0.02)
    return None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder, removed with the context; also remove those of killed launchers. Raises OSError."""
    root = _find_root()
    _remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root, ignore_cleanup_errors=True) as folder:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the kernel releases it with this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(lock)


def _find_root() -> str:
    """Return the directory for temporary files, or /tmp if a socket's path would be too long in it."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root + _SOCKET_PATTERN)) <= _MAX_SOCKET_PATH else "/tmp"  # noqa: S108 - as mkdtemp


def _remove_abandoned(root: str) -> None:
    """Remove this user's folders whose lock no launcher holds, such as that of one that SIGKILL ended."""
    for folder in Path(root).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _MIN_AGE_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
