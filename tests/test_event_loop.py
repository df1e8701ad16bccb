"""What the command line loads."""

import subprocess
import sys


def test_no_ssl() -> None:
    """The daemon's process goes without ssl, which takes 4 MiB, and others can still import it."""
    code = "import sys, gpuwarden.cli, gpuwarden.daemon; assert 'ssl' not in sys.modules; import ssl; ssl.SSLContext"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_tempfile() -> None:
    """Nor does it load what ctypes.util could run a compiler with, 0.65 MiB; which has it when it does."""
    code = (
        "import sys, gpuwarden.cli, gpuwarden.daemon, gpuwarden.sources.driver;"
        "assert not {'tempfile', 'random', 'shutil', 'bz2'} & set(sys.modules);"
        "import ctypes.util, shutil, tempfile; assert ctypes.util.tempfile.gettempdir() == tempfile.gettempdir();"
        "assert ctypes.util.shutil.which is shutil.which"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
