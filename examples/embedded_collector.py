"""Export this machine's GPUs next to a program's own metrics, without the daemon.

Runs until Ctrl-C; without a driver it exports simulated GPUs: `python examples/embedded_collector.py`.
"""

import contextlib
import time

from prometheus_client import CollectorRegistry, Counter, start_http_server

from gpuwarden.collector import GpuWardenCollector

registry = CollectorRegistry()
jobs = Counter("example_jobs", "Finished jobs.", registry=registry)

with contextlib.suppress(KeyboardInterrupt), GpuWardenCollector(overrides={"source": "auto"}) as collector:
    registry.register(collector)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    while True:
        time.sleep(0.1)
        jobs.inc()
