"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from system_parts import needs


def make_certificates(
    folder: Path, *names: str, key: tuple[str, ...] = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")
) -> None:
    """Write an authority (ca.pem, unless there is one) and, signed by it for 127.0.0.1, NAME.pem and NAME.key."""
    openssl = needs("openssl", "openssl")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", *key, "-nodes")
    if not (folder / "ca.pem").exists():
        run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in names:
        run("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
