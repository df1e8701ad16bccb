"""What the command line loads."""

import subprocess
import sys


def test_no_ssl() -> None:
    """The daemon's process goes without ssl, which takes 4 MiB, and others can still import it."""
    code = "import sys, gpuwarden.cli, gpuwarden.daemon; assert 'ssl' not in sys.modules; import ssl; ssl.SSLContext"
    subprocess.run([sys.executable, "-c", code], check=True)
