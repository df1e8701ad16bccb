"""Command `gpuwarden capture`: record the driver's answers in a file."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gpuwarden.capture.capture_file import save_capture
from gpuwarden.capture.masking import mask_capture
from gpuwarden.capture.recording import record
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.configured_source import open_configured_source
from gpuwarden.cli.common.terminal import WRONG_USE, complain, explain_unwritable, say
from gpuwarden.gpu.reader import Plan
from gpuwarden.nvml.return_codes import NVMLError, error_name
from gpuwarden.nvml.troubleshooting import suggest_fix


def run(parsed: argparse.Namespace) -> int:
    """Record the frames and write the file. Raises OSError."""
    config = load_config(parsed)
    if obstacle := explain_unwritable(parsed.file):  # checked before the first frame
        raise OSError(None, obstacle)
    source = open_configured_source(config)
    plan = Plan(opted_in=config.gpus.opted_in)
    try:
        with _interruptible():
            recorded = record(source.nvml, parsed.frames, parsed.interval, plan=plan, host_memory=source.host_memory)
    except NVMLError as error:
        what_to_do = "; ".join(filter(None, [str(error), suggest_fix(error_name(error))]))
        raise OSError(None, f"cannot record: {what_to_do}") from None
    except ValueError as error:
        complain(f"gpuwarden: cannot record: {error}")
        return WRONG_USE
    save_capture(mask_capture(recorded) if parsed.mask else recorded, parsed.file)
    gpus = len(recorded.frames[-1].gpus)
    say(f"{parsed.file}: {len(recorded.frames)} frames of {gpus} GPUs")
    say(f"replay: gpuwarden serve --source capture:{parsed.file}")
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python would wait for a driver call, which may hang."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
