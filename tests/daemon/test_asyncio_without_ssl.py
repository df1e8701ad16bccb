"""asyncio is imported without ssl."""

import subprocess
import sys
from pathlib import Path

import pytest

ONCE = """
import sys
from gpuwarden.cli.main import main
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
