"""Flood of XIDs in the kernel log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

from kernel_log_fifo import Fifo
from services import Samples
from stage import Figure, Scraper, equal, resident, serving, soundness, workplace

CODES = (13, 31, 43, 45, 48, 63, 79, 119)
LOST_EVERY, UNKNOWN_EVERY = 10_000, 1000  # a record that the kernel overwrote; an XID of a GPU that is not here
LINE_BYTES = 128  # divides the size of a read, so that none ends within a line: /dev/kmsg returns whole records
BATCH = 32
DROPPED = "gpuwarden_xid_events_dropped_total"


def write_lines(fifo: Fifo, count: int) -> None:
    """Write the lines as fast as the daemon reads them."""
    os.set_blocking(fifo.file, True)
    for first in range(0, count, BATCH):
        lines = []
        for number in range(first, min(first + BATCH, count)):
            fifo.number += 2 if number % LOST_EVERY == LOST_EVERY - 1 else 1
            bus = 0xFF if number % UNKNOWN_EVERY == UNKNOWN_EVERY - 1 else 0x10 + number % 2
            xid = f"NVRM: Xid (PCI:0000:{bus:x}:00): {CODES[number // 2 % len(CODES)]}, pid=1, name=python"
            record = f"4,{fifo.number},{round(time.monotonic() * 1e6)},-;{xid}"
            lines.append(f"{record:<{LINE_BYTES - 1}}\n")
        os.write(fifo.file, "".join(lines).encode())


def count_all(page: Samples) -> float:
    """Return the XIDs counted or dropped."""
    return sum(sum(page.all(name).values()) for name in ("gpuwarden_gpu_xid_events_total", DROPPED))


def measure_flood(count: int) -> Iterator[Figure]:
    """Write the lines into a FIFO in the place of /dev/kmsg and compare the counters."""
    with workplace() as folder:
        fifo = Fifo(folder / "kmsg")
        config = f"kernel_log: {{path: {fifo.path}}}\npoll: {{interval: 200ms}}\n"
        with serving(folder, config) as daemon, Scraper(daemon) as scraper:
            writer = threading.Thread(target=write_lines, args=(fifo, count), daemon=True)
            began, held = time.monotonic(), []
            writer.start()
            while writer.is_alive():
                assert daemon.popen.poll() is None, daemon.output()
                held.append(resident(daemon))
                time.sleep(0.2)
            seconds = time.monotonic() - began
            end = time.monotonic() + 90  # an XID waits a minute for its GPU to be identified
            while (counted := count_all(daemon.samples())) < count and time.monotonic() < end:
                time.sleep(1)
            page = daemon.samples()
            yield Figure("XIDs in the kernel log", f"{count} in {seconds:.0f} s")
            yield equal("counted, with those dropped and counted so", counted, float(count))
            yield equal(
                "dropped, of a GPU that is not here",
                page.value(DROPPED, reason="unknown_gpu"),
                float(count // UNKNOWN_EVERY),
            )
            lost = page.value("gpuwarden_kernel_log_records_lost_total")
            yield equal("records lost before they were read", lost, float(count // LOST_EVERY))
            yield Figure("lines that the daemon logged", f"{daemon.output().count('XID')}")
            yield from soundness(daemon, held)
        yield from scraper.figures()
        fifo.close()
