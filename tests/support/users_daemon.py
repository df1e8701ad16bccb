"""`gpuwarden` as another user, who may not be able to read the modules: users_daemon.py UID serve ..."""

import ctypes
import encodings.idna  # noqa: F401 - before that user asks for it
import os
import sys

from gpuwarden.cli.commands import serve_command  # noqa: F401
from gpuwarden.cli.main import main

PR_SET_DUMPABLE = 4

uid = int(sys.argv.pop(1))
os.setgroups([])
os.setresuid(uid, uid, uid)
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as of a started program: its own /proc is readable
sys.exit(main())
