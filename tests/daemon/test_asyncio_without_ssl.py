"""Import of asyncio without ssl."""

import subprocess
import sys

ONCE = """
import sys
from gpuwarden.cli.main import main
main(["once", "--source", "simulated"])
print("ssl" in sys.modules, file=sys.stderr)
import ssl
ssl.SSLContext
"""


def test_ssl() -> None:
    """The daemon does not load ssl, which takes 4 MiB, until it sends alerts; it can still be imported."""
    ended = subprocess.run([sys.executable, "-c", ONCE], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "False"
