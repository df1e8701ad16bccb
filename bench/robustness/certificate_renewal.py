"""Certificate and key of the daemon renewed while clients scrape without a pause."""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from certificates import make_certificates
from services import Daemon
from stage import Figure, Scraper, equal, none_of, serving, soundness, timing, workplace

CLIENTS = 20
WEB_CONFIG = "tls_server_config: {cert_file: served/tls.pem, key_file: served/tls.key}\n"
PATIENCE_SECONDS = 30.0


def rename_over(folder: Path, name: str) -> None:
    """Replace certificate and key one after the other, as ACME clients do."""
    for suffix in (".pem", ".key"):
        shutil.copy(folder / f"{name}{suffix}", folder / "next")
        (folder / "next").rename(folder / f"served/tls{suffix}")
        time.sleep(0.05)  # in which they do not fit


def write_over(folder: Path, name: str) -> None:
    """Truncate the files and write them again in pieces, as cp does; the key first."""
    for suffix in (".key", ".pem"):
        new = (folder / f"{name}{suffix}").read_bytes()
        with (folder / f"served/tls{suffix}").open("wb", buffering=0) as file:
            for piece in (new[:100], new[100:]):
                file.write(piece)
                time.sleep(0.02)


def swap_folder(folder: Path, name: str) -> None:
    """Replace the link to the folder of both at once, as Kubernetes does."""
    new = folder / f"files-{name}"
    new.mkdir()
    for suffix in (".pem", ".key"):
        shutil.copy(folder / f"{name}{suffix}", new / f"tls{suffix}")
    (folder / "link").symlink_to(new)
    os.replace(folder / "link", folder / "served")  # noqa: PTH105 - the link itself


WAYS = (rename_over, write_over, swap_folder)


def served_certificate(daemon: Daemon) -> str:
    """Return the certificate that a new connection gets, in PEM."""
    return ssl.get_server_certificate(("127.0.0.1", daemon.port), timeout=PATIENCE_SECONDS)


def measure_renewals(count: int) -> Iterator[Figure]:
    """Renew the certificate and compare what new connections get; a pair that does not fit fails their handshake."""
    with workplace() as folder, ExitStack() as stack:
        names = [f"pair{number}" for number in range(count + 1)]
        make_certificates(folder, *names)
        swap_folder(folder, names[0])
        (folder / "web.yml").write_text(WEB_CONFIG)
        daemon = stack.enter_context(serving(folder, f"web: {{config_file: {folder / 'web.yml'}}}\n"))
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        scrapers = [stack.enter_context(Scraper(daemon, context, pause=0.0)) for _ in range(CLIENTS)]
        late = [renew(folder, name, WAYS[number % len(WAYS)], daemon) for number, name in enumerate(names[1:])]
        yield Figure(f"requests of {CLIENTS} clients", str(sum(len(each.seconds) for each in scrapers)))
        yield none_of("failed requests", [text for each in scrapers for text in each.failures])
        used = [each for each in late if each is not None]
        yield equal("renewed certificates in use afterwards", len(used), count)
        if used:
            yield timing("longest time until a new certificate is used", max(used) * 1e3, 1000)
        yield from soundness(daemon)


def renew(folder: Path, name: str, way: Callable[[Path, str], None], daemon: Daemon) -> float | None:
    """Renew the pair; return the seconds until a new connection gets it, None if it does not."""
    expected = (folder / f"{name}.pem").read_text().strip()
    way(folder, name)
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_SECONDS:
        if served_certificate(daemon).strip() == expected:
            return time.monotonic() - began
        time.sleep(0.02)
    return None
