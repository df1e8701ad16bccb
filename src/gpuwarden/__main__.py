"""`python -m gpuwarden`."""

import sys

# -m puts the working folder first on the path, where a program's random.py would be imported in place of Python's.
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False) or __file__.startswith(sys.path[0])):
    del sys.path[0]

from gpuwarden.cli.main import main

sys.exit(main())
