"""Polls without a free file descriptor leave out optional work."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, resource
from gpuwarden.daemon import systemd
from gpuwarden.owners.processes import ProcessIdentifier
names = ProcessIdentifier()
names.identify([os.getppid()])  # has psutil import and open what it opens once
resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
systemd.notify("WATCHDOG=1")
print(names.identify([os.getpid()]))
"""


def test_poll_survives_without_descriptors() -> None:
    """Without a free file descriptor, neither the notification to systemd nor the lookup of a new process raises."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NOTIFY_SOCKET": "/nowhere/notify"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{}\n", "")
