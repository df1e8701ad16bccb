"""`gpuwarden` with constants set to what a test needs: python altered_daemon.py '{"MODULE:NAME": VALUE}' serve ..."""

import importlib
import json
import sys
from pathlib import Path

from gpuwarden.cli.main import main

for place, value in json.loads(sys.argv[1]).items():
    module, _, name = place.partition(":")
    home = importlib.import_module(module)
    kind = type(getattr(home, name))  # raises if there is no such constant: otherwise the test would test nothing
    setattr(home, name, Path(value) if issubclass(kind, Path) else kind(value))
sys.exit(main(sys.argv[2:]))
