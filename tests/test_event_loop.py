"""Sleep of the event loop, and its import without ssl."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.event_loop import Alarm

ONCE = """
import sys
from gpuwarden.cli import main
main(["once", "--source", "simulated", *sys.argv[1:]])
print("ssl" in sys.modules, file=sys.stderr)
import ssl
ssl.SSLContext
"""


@pytest.mark.parametrize(("config", "loaded"), [("", "False"), ("alertmanager: {url: 'http://127.0.0.1:1'}", "True")])
def test_ssl(config: str, loaded: str, tmp_path: Path) -> None:
    """The daemon loads ssl, 4 MiB, only where it sends alerts; it stays importable."""
    file = tmp_path / "config.yaml"
    file.write_text(config)
    code = [sys.executable, "-c", ONCE, "--config", str(file)]
    ended = subprocess.run(code, capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == loaded


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
