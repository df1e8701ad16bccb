"""Command `gpuwarden debug-bundle`: one file for a bug report."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpuwarden.capture.capture_file import render_capture
from gpuwarden.capture.masking import Masks, mask_capture
from gpuwarden.capture.recording import record
from gpuwarden.capture.text_masking import UNMASKED, TextMasks
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.configured_source import open_configured_source
from gpuwarden.cli.common.terminal import say
from gpuwarden.cli.debug_bundle.bundle_contents import collect_texts, find_names
from gpuwarden.config.loader import ConfigError
from gpuwarden.config.schema import Config
from gpuwarden.formatting import format_bytes
from gpuwarden.gpu.reader import Plan
from gpuwarden.nvml.return_codes import NVMLError

_FRAMES, _INTERVAL_SECONDS = 3, 1.0


def run(parsed: argparse.Namespace) -> int:
    """Collect, mask and write the files, and list them. Raises OSError."""
    try:
        config, problems = load_config(parsed), ""
    except ConfigError as error:  # which may be what the report is about
        config, problems = error.config, f"{error}\n"
    logging.disable(logging.CRITICAL)  # the files say what a log line would
    path = parsed.file or Path(time.strftime("gpuwarden-debug-%Y%m%d-%H%M%S.tar.gz"))
    with _create(path) as file:
        texts, masks = collect_texts(config, problems), Masks()
        text_masks = TextMasks(masks, find_names(config, texts))
        files = {name: text_masks.mask(text) for name, text in texts.items()}
        if parsed.capture:
            files["capture.json"] = _capture(config, masks)
        _write(file, files)
    say(f"{path}:")
    for name, text in files.items():
        say(f"  {name:<13}{format_bytes(len(text.encode())):>10}")
    say(f"Not masked: {UNMASKED}. Read the files before you share them.")
    return 0


def _capture(config: Config, masks: Masks) -> str:
    """Return a capture of the driver, or why there is none. Blocks as long as the driver does."""
    try:
        source = open_configured_source(config)
        plan = Plan(opted_in=config.gpus.opted_in)
        taken = record(source.nvml, _FRAMES, _INTERVAL_SECONDS, plan=plan, host_memory=source.host_memory)
    except (NVMLError, OSError) as error:
        return f"cannot record: {error}\n"
    return render_capture(mask_capture(taken, masks))


@contextlib.contextmanager
def _create(path: Path) -> Iterator[BinaryIO]:
    """Create a file, readable for this user only: masking may have missed something. Remove it if writing fails.

    Existing files and links may be of another user, who could read what is written to them.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _write(file: BinaryIO, files: dict[str, str]) -> None:
    """Write the archive."""
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"gpuwarden-debug/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
