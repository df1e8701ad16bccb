"""Reader of the daemon's Unix socket as another user: `api_reader.py UID SOCKET PATH` prints the answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpuwarden.cli.common.api_client import fetch_json

if __name__ == "__main__":
    uid, path, target = sys.argv[1:]
    if os.geteuid() == 0:
        os.setgroups([])
    os.setresuid(int(uid), int(uid), int(uid))
    json.dump(fetch_json(Path(path), target), sys.stdout)
