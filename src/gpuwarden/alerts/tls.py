"""TLS as a client: by whom servers are known, and the certificate that the daemon shows them.

Loaded only where somebody is to be reached over TLS: it takes 4 MiB.
"""

from __future__ import annotations

import ssl
from pathlib import Path


def context(trusted: Path | None, own: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return what connections are made with: certificates are checked, by the system's authorities and those `trusted`.

    `own` is the daemon's certificate, with its key, which may be in a file of its own. Raises OSError with a sentence
    as `strerror` that names the file that cannot be read or used.
    """
    made = ssl.create_default_context()
    for path in (trusted, own, key):
        if path is not None:
            try:
                path.open("rb").close()  # of several files TLS does not say which one it cannot read
            except OSError as error:
                raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
    try:
        if trusted is not None:
            made.load_verify_locations(trusted)
    except OSError as error:  # ssl.SSLError is one
        raise OSError(error.errno, f"{trusted} cannot be used: {error.strerror or error}") from None
    try:
        if own is not None:
            made.load_cert_chain(own, key, password="")
    except OSError as error:
        raise OSError(error.errno, f"{own} with its key cannot be used: {error.strerror or error}") from None
    return made


def fault(error: ssl.SSLError) -> str:
    """Say what is wrong, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return f"TLS fails: {(error.reason or str(error)).replace('_', ' ').lower()}"
