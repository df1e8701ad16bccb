"""Build the mock by hand: `python -m mock_nvml DIRECTORY` prints the folder for LD_LIBRARY_PATH."""

import sys
from pathlib import Path

from mock_nvml.compiling import build

if len(sys.argv) != 2:
    sys.exit(f"usage: {sys.executable} -m mock_nvml DIRECTORY")
sys.stdout.write(f"{build(Path(sys.argv[1]).resolve())}\n")
