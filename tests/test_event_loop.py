"""What the command line loads, and how its loop sleeps."""

import asyncio
import subprocess
import sys

from gpuwarden.event_loop import Alarm


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


def test_nudge_wakes_once() -> None:
    """Who sleeps wakes, and who sleeps next if nobody does; the sleep after that lasts, and a ring ends all."""

    async def sleeps() -> list[bool]:
        alarm, loop = Alarm(), asyncio.get_running_loop()
        found = [await alarm.sleep(loop.time())]
        loop.call_soon(alarm.nudge)
        found.append(await alarm.sleep(loop.time() + 3600))
        alarm.nudge()
        alarm.nudge()
        found += [await alarm.sleep(loop.time() + 3600), await alarm.sleep(loop.time())]
        loop.call_soon(alarm.ring)
        found += [await alarm.sleep(loop.time() + 3600), await alarm.sleep(loop.time() + 3600)]
        return found

    assert asyncio.run(asyncio.wait_for(sleeps(), 10)) == [False, True, True, False, False, False]
