"""Another user's process at the socket of runs: `impostor.py SOCKET UID [make]`, started as root.

With `make` the user first makes the folder. It says "ready" once it listens, gives every run that connects critical
advice, and prints each message that a run sends. It ends with standard input.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from pathlib import Path

ADVICE = (
    b'{"v":1,"type":"advice","serial":1,"kind":"pressure","level":"critical","uuid":"GPU-0","text":"stop",'
    b'"resource":"memory"}'
)


def main() -> None:
    """Listen as that user."""
    path, uid, make = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["make"]
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    if make:
        path.parent.mkdir(mode=0o755)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    runs: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([sys.stdin, listener, *runs], [], [])
        if sys.stdin in readable:
            return
        for run in [each for each in runs if each in readable]:
            try:
                data = run.recv(65536)
            except OSError:
                data = b""
            if data:
                sys.stdout.write(data.decode() + "\n")
                sys.stdout.flush()
            else:
                runs.remove(run)
        if listener in readable:
            runs.append(listener.accept()[0])
            with contextlib.suppress(OSError):  # it has hung up
                runs[-1].send(ADVICE)


if __name__ == "__main__":
    main()
