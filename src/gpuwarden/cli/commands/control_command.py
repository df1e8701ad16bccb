"""Commands `gpuwarden pause`, `resume` and `incidents record`: requests to the daemon's control socket."""

from __future__ import annotations

import argparse

from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import FAILED, complain, say
from gpuwarden.protocol.control_client import send_command


def pause(parsed: argparse.Namespace) -> int:
    """Make the daemon release the driver."""
    return _send(parsed, f"pause {parsed.seconds:g}")


def resume(parsed: argparse.Namespace) -> int:
    """End a pause."""
    return _send(parsed, "resume")


def record_incident(parsed: argparse.Namespace) -> int:
    """Make the daemon record an incident."""
    return _send(parsed, " ".join(f"record {parsed.note}".split()))


def _send(parsed: argparse.Namespace, request: str) -> int:
    done, text = send_command(load_config(parsed).control_socket, request)
    if not done:
        complain(f"gpuwarden: {text}")
        return FAILED
    say(text)
    return 0
