"""Socket of another user at the path of the daemon's: real users, folders and a real fit."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from moved_clock import Clock
from run_socket_fixtures import END, HELLO
from services import ROOT

from gpuwarden.client.connection import MAX_RETRY_SECONDS, DaemonConnection
from gpuwarden.host.unix_socket import listen
from gpuwarden.protocol.socket_trust import find_distrust
from system_parts import needs_framework, require

SQUATTER = 65534
SERVICE = 64999  # a service's user
TRAINER = 64998
PATIENCE = 60

Impostor = Callable[..., "subprocess.Popen[str]"]

FIT = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
from gpuwarden.keras import GpuWarden, keras
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((400, 3), "float32")
fit = model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=[GpuWarden(on_pressure="stop", interval=0)])
print("epochs", len(fit.history["loss"]), "updates", int(model.optimizer.iterations.numpy()))
"""
# All imports come first: the interpreter may lie where only root can read it.
SEND = f"""
import ctypes, os, sys
from pathlib import Path
from gpuwarden.client.connection import DaemonConnection
from gpuwarden.protocol.messages import End, Hello
connection = DaemonConnection(sys.argv[1], Hello("a", "b", {{}}))
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([]); os.setgid({TRAINER}); os.setuid({TRAINER})
if libc.prctl(4, 1, 0, 0, 0) or libc.unshare(0x10000000):  # PR_SET_DUMPABLE, for /proc/self; CLONE_NEWUSER
    sys.exit(os.strerror(ctypes.get_errno()))
Path("/proc/self/uid_map").write_text("{TRAINER} {TRAINER} 1")
print(os.getuid(), os.stat("/run").st_uid, connection.send(End("exit")))
"""


@pytest.fixture
def listens() -> Iterator[Impostor]:
    """Start processes of other users that listen at a path."""
    require(os.geteuid() == 0, "only root can act as other users: run this test as root")
    with ExitStack() as stack:

        def start(path: Path, uid: int = SQUATTER, *more: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(ROOT / "tests/support/impostor.py"), str(path), str(uid), *more]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


@contextmanager
def folder_in(parent: str, uid: int = 0, mode: int = 0o755) -> Iterator[Path]:
    """Make a folder that belongs to a user."""
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-test-", dir=parent))
    try:
        os.chown(folder, uid, uid)
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def user(uid: int) -> Iterator[None]:
    """Act as another user, with that user's access to files."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def squat(listens: Impostor) -> Iterator[Path]:
    """Return the socket of a user who has made the folder in /tmp before the daemon could."""
    folder = Path(tempfile.gettempdir(), f"gpuwarden-test-squat-{os.getpid()}")
    path = folder / "gpuwarden.sock"
    listens(path, SQUATTER, "make")
    yield path
    shutil.rmtree(folder)


def sends(path: Path, caplog: pytest.LogCaptureFixture | None = None) -> bool:
    """Return whether a run of the own user sends to the process that listens at `path`."""
    clock = Clock()
    connection = DaemonConnection(str(path), HELLO, clock)
    with caplog.at_level(logging.INFO) if caplog else ExitStack():
        sent = connection.send(END)
        for _ in range(3):
            clock.now += MAX_RETRY_SECONDS
            assert connection.send(END) == sent
        if not sent:
            assert connection.receive() == []
            assert not connection.is_connected()
    connection.close()
    return sent


def test_squatted_folder(squat: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run sends nothing to another user, takes no advice, and logs that once, however often it retries."""
    assert not sends(squat, caplog)
    reason = f'uid={SQUATTER} reason="other users can write {squat.parents[1]}"'
    assert caplog.messages == [f'gpuwarden daemon not trusted, ignored {reason} socket="{squat}"']
    assert caplog.records[0].levelno == logging.WARNING


def test_refusal_shows_after_an_absent_daemon(listens: Impostor, caplog: pytest.LogCaptureFixture) -> None:
    """A run that has found no daemon at first still reports the one that it refuses."""
    with folder_in(tempfile.gettempdir(), SQUATTER) as folder, caplog.at_level(logging.INFO):
        clock = Clock()
        connection = DaemonConnection(str(folder / "run.sock"), HELLO, clock)
        connection.send(END)
        listens(folder / "run.sock")
        clock.now += MAX_RETRY_SECONDS
        connection.send(END)
        connection.close()
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING"]


@pytest.mark.frameworks
@needs_framework("tensorflow")
def test_fit_is_not_stopped(squat: Path) -> None:
    """A real fit with on_pressure="stop" makes all its steps, and its log names the refused daemon once."""
    done = subprocess.run(
        [sys.executable, "-c", FIT],
        env={**os.environ, "GPUWARDEN_SOCKET": str(squat), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["epochs", "2", "updates", "400"]
    assert done.stderr.count("gpuwarden daemon not trusted") == 1


def test_replaced_socket(listens: Impostor) -> None:
    """In a folder that others can write, a run accepts its own user's and root's daemon, and no other."""
    with folder_in(tempfile.gettempdir(), mode=0o1777) as folder:
        path = folder / "run.sock"
        with listen(path, 0o666, socket.SOCK_SEQPACKET, "runs.socket"):
            assert sends(path)
        path.unlink()
        listens(path)
        assert not sends(path)


def test_service_user(listens: Impostor) -> None:
    """The service's user is known by its folder in /run, which only root can have made; another user there is not."""
    with folder_in("/run", SERVICE) as folder:
        listens(folder / "run.sock", SERVICE)
        assert sends(folder / "run.sock")
        (folder / "run.sock").unlink()
        folder.chmod(0o777)
        listens(folder / "run.sock", TRAINER)
        assert not sends(folder / "run.sock")
        folder.chmod(0o755)  # it is there already
        assert not sends(folder / "run.sock")


@pytest.mark.parametrize(("owner", "trusted"), [(0, True), (SQUATTER, False)])
def test_links(listens: Impostor, owner: int, *, trusted: bool) -> None:
    """A link on the way counts as its maker's: /var/run leads to /run, and a squatter's link to their own folder."""
    with folder_in("/run", SERVICE) as folder, folder_in("/run") as links:
        listens(folder / "run.sock", SERVICE)
        (links / "link").symlink_to(folder)
        os.chown(links / "link", owner, owner, follow_symlinks=False)
        assert sends(links / "link" / "run.sock") == trusted


@pytest.mark.parametrize("target", ["", "run.sock"], ids=["folder", "socket"])
@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["open", "closed"])
def test_squatters_link_in_a_shared_folder(
    listens: Impostor, caplog: pytest.LogCaptureFixture, mode: int, target: str
) -> None:
    """A run names a link of another user in a folder such as /tmp, whether the kernel follows it or answers EACCES.

    fs.protected_symlinks decides that where the link leads to an open folder. A closed folder makes the kernel answer
    EACCES under any setting.
    """
    tmp = tempfile.gettempdir()
    with folder_in(tmp, mode=0o1777) as links, folder_in(tmp, SQUATTER, mode) as folder:
        listens(folder / "run.sock")
        (links / "link").symlink_to(folder / target)
        os.chown(links / "link", SQUATTER, SQUATTER, follow_symlinks=False)
        path = links / "link" if target else links / "link/run.sock"
        with user(TRAINER):
            assert not sends(path, caplog)
        (message,) = caplog.messages
        assert message.startswith("gpuwarden daemon not trusted, ignored ")
        assert message.endswith(f' reason="{links}/link belongs to user id {SQUATTER}" socket="{path}"')


@pytest.mark.parametrize("uid", [0, SERVICE])
def test_user_namespace(listens: Impostor, uid: int) -> None:
    """In a container with mapped users, root and the service have the overflow id: their folder identifies them."""
    with folder_in("/run", uid) as folder, folder_in(tempfile.gettempdir(), uid) as elsewhere:
        for path, sent in ((folder / "run.sock", True), (elsewhere / "run.sock", False)):
            listens(path, uid)
            done = subprocess.run(
                [sys.executable, "-c", SEND, path], capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            require(done.returncode == 0, f"no user namespace can be made here: {done.stderr}")
            assert done.stdout.split() == [str(TRAINER), str(SQUATTER), str(sent)], done.stderr


def test_idmapped_mount() -> None:
    """A container that sees the folder's owner, but not who listens, trusts by the folder; a known user must own it."""
    require(os.geteuid() == 0, "only root can make folders of other users: run this test as root")
    with folder_in("/run", SERVICE) as folder:
        assert find_distrust(folder / "run.sock", SQUATTER) is None
        assert find_distrust(folder / "run.sock", TRAINER) == f"{folder} belongs to user id {SERVICE}"
        folder.chmod(0o1777)
        assert find_distrust(folder / "run.sock", SQUATTER) == f"other users can write {folder}"


def test_daemon_in_a_squatted_folder(squat: Path) -> None:
    """The daemon refuses a folder that another user has made, with a text that says what to do."""
    with pytest.raises(OSError, match=f"{squat.parent} belongs to user id {SQUATTER}, who can replace .* runs.socket"):
        listen(squat.with_name("other.sock"), 0o666, socket.SOCK_SEQPACKET, "runs.socket")
    assert not squat.with_name("other.sock").exists()


@pytest.mark.parametrize("folder", ["", "sub"])
def test_daemon_behind_a_squatters_link(tmp_path: Path, folder: str) -> None:
    """A link that another user has made into the daemon's own folder is refused likewise.

    The daemon checks it before the kernel has to follow it, so the test covers any fs.protected_symlinks.
    """
    require(os.geteuid() == 0, "only root can act as other users: run this test as root")
    link = Path(tempfile.gettempdir(), f"gpuwarden-test-link-{os.getpid()}")
    link.symlink_to(tmp_path)
    try:
        os.chown(link, SQUATTER, SQUATTER, follow_symlinks=False)
        with pytest.raises(OSError, match=f"{link} belongs to user id {SQUATTER}"):
            listen(link / folder / "run.sock", 0o666, socket.SOCK_SEQPACKET, "runs.socket")
        assert list(tmp_path.iterdir()) == []
    finally:
        link.unlink()


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_folder_that_others_can_write(tmp_path: Path, mode: int, *, refused: bool) -> None:
    """The daemon refuses a folder in which everybody can replace the socket; the sticky bit of /tmp prevents that."""
    tmp_path.chmod(mode)
    with ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(OSError, match=f"every user can write {tmp_path} .*; run chmod o-w"))
        stack.enter_context(listen(tmp_path / "run.sock", 0o666, socket.SOCK_SEQPACKET, "runs.socket"))
    assert (tmp_path / "run.sock").exists() == (not refused)
