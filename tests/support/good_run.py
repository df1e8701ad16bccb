"""A well-behaved run: reports at `good_run.py SOCKET [NAME]` until it is killed, and prints each step."""

from __future__ import annotations

import sys
import time

from gpuwarden.client.reporter import join_run
from gpuwarden.protocol.messages import Hello


def main() -> None:
    """Make steps of 50 ms, and report as callbacks do."""
    path, name = [*sys.argv[1:], "good"][:2]
    run = join_run(path, Hello(name, "none", {}))
    run.state.phase, run.state.stepping = "train", True
    while True:
        time.sleep(0.05)
        run.add_executions([0.05], 1)
        now = time.monotonic()
        if now >= run.observe_due:
            run.observe(now)
        sys.stdout.write(f"{run.state.steps}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
