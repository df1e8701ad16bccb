"""Permission to report by the group of the socket, with real users that the kernel refuses or admits."""

import grp
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.host.unix_socket import listen
from system_parts import require

CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
    try:
        run.connect(sys.argv[1])
    except OSError as error:
        sys.exit(error.strerror)
"""


def connect_error(path: Path, group: int) -> str:
    """Connect as the user nobody with that group; return the kernel's error, empty if it connects."""
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, path, str(group)], capture_output=True, text=True, check=False
    )
    return done.stderr.strip()


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that every user may enter, like the service's."""
    require(os.geteuid() == 0, "only root can act as other users: run this test as root")
    folder = tmp_path_factory.mktemp("socket")
    for each in (folder, *folder.parents):
        if each.owner() == "root" and each.is_relative_to("/tmp") and each != Path("/tmp"):  # noqa: S108  pytest's own
            each.chmod(0o755)
    return folder


def test_only_the_group_may_connect(place: Path) -> None:
    """The kernel refuses a user outside the configured group, and admits a member."""
    group = grp.getgrgid(Path("/etc/shadow").stat().st_gid)  # any group except root's
    assert group.gr_gid
    path = place / "run.sock"
    with listen(path, 0o660, socket.SOCK_SEQPACKET, "runs.socket", group=group.gr_name):
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, group.gr_gid)
        assert connect_error(path, 65534) == "Permission denied"
        assert connect_error(path, group.gr_gid) == ""


def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    """A group that does not exist stops the daemon with its name, and leaves no socket behind."""
    path = tmp_path / "run.sock"
    with pytest.raises(
        OSError, match=r"group no-such-group does not exist: create it, or set another runs\.socket_group"
    ):
        listen(path, 0o660, socket.SOCK_SEQPACKET, "runs.socket", group="no-such-group")
    assert not path.exists()


def test_a_folder_that_the_daemon_cannot_write(place: Path) -> None:
    """A daemon that may not create its socket, as in a container, reports the user id that needs the folder."""
    code = f"""
import os, socket
from pathlib import Path
from gpuwarden.host.unix_socket import listen
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listen(Path({str(place)!r}, "run.sock"), 0o660, socket.SOCK_SEQPACKET, "runs.socket")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"user id 65534 cannot listen on {place}/run.sock: Permission denied" in done.stderr


def test_a_group_that_is_not_the_daemons_own(place: Path) -> None:
    """A daemon that is not in the group reports the line to add to its unit."""
    code = f"""
import os, socket
from pathlib import Path
from gpuwarden.host.unix_socket import listen
os.chown({str(place)!r}, 65534, -1)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listen(Path({str(place)!r}, "run.sock"), 0o660, socket.SOCK_SEQPACKET, "runs.socket", group="root")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"the daemon's user must be in it \(SupplementaryGroups=root in a drop-in", done.stderr)


def test_without_a_group_it_is_the_daemons(tmp_path: Path) -> None:
    """Without a configured group the owner stays the same."""
    path = tmp_path / "run.sock"
    with listen(path, 0o666, socket.SOCK_SEQPACKET, "runs.socket") as listener:
        assert path.stat().st_gid == os.getegid()
        assert listener.type == socket.SOCK_SEQPACKET
