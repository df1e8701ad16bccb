"""`python -m gpuwarden`."""

import sys

from gpuwarden.cli.main import main

sys.exit(main())
