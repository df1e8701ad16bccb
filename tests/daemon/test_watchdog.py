"""Notifications to systemd's watchdog, with a real datagram socket and a simulated driver that hangs."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_simulation import FaultySimulation
from simulated_box import make_simulation

from gpuwarden.config.loader import load
from gpuwarden.daemon import systemd
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.sources import Source
from gpuwarden.gpu.poller import Poller


class Manager:
    """The service manager's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(address)

    def received(self) -> set[str]:
        """Return the assignments of the next message."""
        return set(self.socket.recv(4096).decode().splitlines())


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Listen at NOTIFY_SOCKET."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    manager = Manager(str(tmp_path / "notify"))
    with manager.socket:
        yield manager


@pytest.fixture
def box() -> Iterator[FaultySimulation]:
    """Yield a simulated machine with two GPUs; end its hangs afterwards."""
    with make_simulation(gpus=2) as box:
        yield box


def daemon(box: FaultySimulation) -> Daemon:
    """Return a daemon that serves, and gives up a hanging call soon."""
    warden = Daemon(load(None, {"poll.interval": "100ms"}), Source("simulated", box.nvml))
    loop = asyncio.new_event_loop()
    warden.poll_loop.attach(loop)
    loop.close()
    return warden


def test_daemon_inside_another_program_is_silent(box: FaultySimulation, manager: Manager) -> None:
    """The service is another program, whose watchdog the daemon must not notify."""
    asyncio.run(Daemon(load(None, {}), Source("simulated", box.nvml)).poll())
    with pytest.raises(BlockingIOError):
        manager.received()


def sends_heartbeat(warden: Daemon, manager: Manager) -> bool:
    """Poll once and return whether that sent a heartbeat."""
    asyncio.run(warden.poll())
    return "WATCHDOG=1" in manager.received()


def test_driver_that_stops_answering_stops_the_heartbeat(box: FaultySimulation, manager: Manager) -> None:
    """While all GPUs of a driver that has answered before hang, no heartbeat is sent."""

    async def scenario() -> None:
        warden = daemon(box)
        await warden.poll()
        assert manager.received() == {"STATUS=2 of 2 simulated GPUs up, 0 runs reporting", "WATCHDOG=1"}
        box.gpu(0).hang()
        await warden.poll()
        assert manager.received() == {"STATUS=1 of 2 simulated GPUs up, 0 runs reporting", "WATCHDOG=1"}
        box.gpu(1).hang()
        await warden.poll()
        assert manager.received() == {"STATUS=0 of 2 simulated GPUs up, 0 runs reporting"}

    asyncio.run(scenario())


def test_driver_that_never_answered_keeps_the_heartbeat(box: FaultySimulation, manager: Manager) -> None:
    """Heartbeats continue, because a restart would only repeat a slow start."""
    box.driver.hang()
    assert sends_heartbeat(daemon(box), manager)


def test_pause_keeps_the_heartbeat(box: FaultySimulation, manager: Manager) -> None:
    """A released driver does not hang, and the status line shows the pause."""

    async def scenario() -> None:
        warden = daemon(box)
        await warden.poll()
        manager.received()
        await warden.pause("60")
        status, heartbeat = sorted(manager.received())
        assert re.fullmatch(r"STATUS=paused until \d\d:\d\d:\d\d, 0 runs reporting", status)
        assert heartbeat == "WATCHDOG=1"
        await warden._resume("")
        assert manager.received() == {"STATUS=2 of 2 simulated GPUs up, 0 runs reporting", "WATCHDOG=1"}

    asyncio.run(scenario())


def test_process_that_cannot_end_keeps_the_heartbeat(
    box: FaultySimulation, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in an uninterruptible driver call keeps its heartbeat: aborted, it would still hold the port."""

    async def scenario() -> None:
        warden = daemon(box)
        await warden.poll()
        manager.received()
        box.gpu(0).hang()
        box.gpu(1).hang()
        monkeypatch.setattr(Poller, "uninterruptible", True)  # state D needs a broken kernel module
        await warden.poll()
        assert "WATCHDOG=1" in manager.received()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("watchdog", "expected"),
    [
        (None, {"READY=1"}),
        ("30000000", {"READY=1", "WATCHDOG_USEC=40000000"}),
        ("50000000", {"READY=1"}),
    ],
)
def test_watchdog_timeout_covers_four_polls(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, watchdog: str | None, expected: set[str]
) -> None:
    """A watchdog timeout below four polls is raised, a longer one is kept, and without one none is set."""
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    if watchdog:
        monkeypatch.setenv("WATCHDOG_USEC", watchdog)
    systemd.notify_ready(longest_silence=40)
    assert manager.received() == expected


def test_manager_with_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that begins with @ is no file."""
    manager = Manager("")  # the kernel chooses an abstract address
    with manager.socket:
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + manager.socket.getsockname()[1:].decode())
        systemd.notify("READY=1")
        assert manager.received() == {"READY=1"}


def test_missing_manager_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without a receiver is dropped."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "missing"))
    systemd.notify("READY=1")
