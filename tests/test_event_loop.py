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


def test_no_compressors() -> None:
    """Nor shutil for the width of its help."""
    code = (
        "import sys, gpuwarden.cli; assert gpuwarden.cli.main(['reference', 'xid']) == 0;"
        "assert not {'shutil', 'bz2', 'lzma'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_no_idna() -> None:
    """Nor the codec of international host names, for one that is not."""
    code = (
        "import sys; from gpuwarden.listening import listen; listen('127.0.0.1', 0); listen('localhost', 0);"
        "assert not {'encodings.idna', 'unicodedata'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
