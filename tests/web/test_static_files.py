"""Files of the status page: all in the package, compressed, kept by browsers, under a strict policy."""

from __future__ import annotations

import gzip
import json
import re
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

from services import ROOT, Daemon, end_processes

from gpuwarden.web.static_files import FOLDER
from mock_nvml import MockNvml


def get(url: str, **headers: str) -> tuple[int, Message, bytes]:
    """Return status, headers and body of a page."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as found:
            return found.status, found.headers, found.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_every_file_is_in_the_package() -> None:
    """A built wheel has the files named in pyproject.toml, including the license of the charts."""
    (globs,) = re.findall(r"^gpuwarden = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = {path for glob in json.loads(f"[{globs}]") for path in (ROOT / "src/gpuwarden").glob(glob)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= named
    assert "MIT" in (FOLDER / "uplot/LICENSE").read_text()


def test_files_are_compressed_and_cached(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A second visit gets a 304 without a body; an unknown file gets a 404."""
    daemon = Daemon(tmp_path, env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        url = f"{daemon.url}/page/uplot/uPlot.iife.min.js"
        status, headers, body = get(url, **{"Accept-Encoding": "gzip"})
        assert (status, headers["content-encoding"], headers["content-type"]) == (
            200,
            "gzip",
            "text/javascript; charset=utf-8",
        )
        assert gzip.decompress(body) == (FOLDER / "uplot/uPlot.iife.min.js").read_bytes() == get(url)[2]
        assert (headers["cache-control"], headers["vary"]) == ("no-cache", "accept-encoding")
        status, headers, body = get(url, **{"If-None-Match": headers["etag"]})
        assert (status, body) == (304, b"")
        assert "content-length" not in headers
        assert get(url, **{"If-None-Match": 'W/"other"'})[0] == 200
        policy = get(f"{daemon.url}/")[1]["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        for name in ("nosuch.js", "../daemon.py", "..%2f..%2fdaemon.py", "uplot/", "uplot/LICENSE", "index.html", ""):
            assert get(f"{daemon.url}/page/{name}")[0] == 404, name
