"""Command `gpuwarden debug-bundle`: one file for a bug report."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import pwd
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gpuwarden._version import __version__
from gpuwarden.capture.capture_file import render_capture
from gpuwarden.capture.masking import UNMASKED, Masks, TextMasks, mask_capture
from gpuwarden.capture.recording import record
from gpuwarden.cli.common.api_client import fetch
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.configured_source import open_configured_source
from gpuwarden.cli.common.terminal import say
from gpuwarden.cli.top.state_reader import fetch_state
from gpuwarden.config.loader import ConfigError
from gpuwarden.config.schema import OPTIONS, Config
from gpuwarden.config.secrets import HIDDEN, Secret
from gpuwarden.config.value_types import Address
from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import run_checks
from gpuwarden.formatting import format_bytes
from gpuwarden.gpu.reader import Plan
from gpuwarden.nvml.return_codes import NVMLError
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.web.api.api_object import ApiObject

T = TypeVar("T")

_FRAMES, _INTERVAL_SECONDS = 3, 1.0
LOG_MINUTES = 10
MAX_LOG_LINES = 5000
MIN_USER_UID = 1000  # of a person (login.defs(5))
_PACKAGES = ("nvidia-ml-py", "prometheus-client", "psutil", "PyYAML", "rich", "h11", "bcrypt", "apprise")
_OWNERS = [kind for kind in OWNER_KINDS if kind.name not in ("run", "slurm_job")]  # those are numbers
_LABELS = "|".join(("run_name", "job_id", *(kind.label for kind in _OWNERS)))
_VALUE = r'(?:[^"\\]|\\.)+'  # of a label, with its escapes
_SERIAL = re.compile(r'\bserial="([^"]+)"')
_NAME = re.compile(rf'\b(?:{_LABELS})="({_VALUE})"|\bowner="({_VALUE})",owner_kind="(?:{_LABELS})"')

# A run's name and the text of its error, in a line about the run.
_OF_RUN = re.compile(r".*\brun=.*")
_PRIVATE_FIELD = re.compile(r'\b(name|error)=(?:"(?:[^"\\]|\\.)*"|\S+)')


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
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"gpuwarden-debug/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))


def collect_texts(config: Config, problems: str) -> dict[str, str]:
    """Return the texts by the name of their file; where one is missing, its text says why. Takes some seconds.

    `problems` are those of the configuration, of which `config` has the valid options.
    """
    read: Mapping[str, Callable[[], str]] = {
        "version.txt": lambda: "".join(f"{line}\n" for line in _list_versions()),
        "config.txt": lambda: problems + "".join(f"{key}: {_render(attrgetter(key)(config))}\n" for key in OPTIONS),
        "daemon.log": _read_log,
        "scrape.txt": lambda: _ask(config, partial(fetch, path="/metrics")).decode(errors="replace"),
        # With the characters of names as they are, not as escapes.
        "state.json": lambda: json.dumps(_ask(config, fetch_state), ensure_ascii=False, indent=1) + "\n",
        "doctor.json": _run_doctor,
    }
    return {name: _text_or_reason(each) for name, each in read.items()}


def find_names(config: Config, texts: Mapping[str, str]) -> set[str]:
    """Return the names of users, hosts, runs, containers, pods and units, and serial numbers, that are in texts."""
    people = [each for each in pwd.getpwall() if each.pw_uid >= MIN_USER_UID and each.pw_name != "nobody"]
    names = {name for each in people for name in (each.pw_name, each.pw_gecos.partition(",")[0])}
    names |= {name for found in _NAME.findall(texts["scrape.txt"]) for name in found}
    alertmanager, host = config.alertmanager, socket.gethostname()
    names |= {*config.web.allowed_hosts, alertmanager.user, alertmanager.instance, *dict(alertmanager.labels).values()}
    names |= {*_names_in(texts["state.json"]), host, host.partition(".")[0]}
    names = {name for name in names if not name.isdecimal()} | set(_SERIAL.findall(texts["scrape.txt"]))
    whole = "\n".join(texts.values())
    return {name for name in names if name in whole}  # a directory service may have thousands of users


def _names_in(state: str) -> Iterator[str]:
    try:
        document = ApiObject(json.loads(state))
    except ValueError:  # no daemon has answered
        return
    yield document.part("host").text("name")
    # Events know runs that have ended, and former names of a process with several runs.
    for each in (*document.parts("runs"), *document.parts("processes"), *document.parts("events")):
        values = map(each.value, ("name", "job", "run_name", *(kind.key for kind in _OWNERS)))
        yield from (_escape(str(value)) for value in values if value)


def _escape(name: str) -> str:
    """Return a name as the files have it: labels, JSON and fields of the log escape quotes and backslashes alike."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _text_or_reason(read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {getattr(error, 'strerror', None) or error}\n"


def _list_versions() -> Iterator[str]:
    yield f"gpuwarden {__version__}"
    yield f"Python {platform.python_version()}"
    yield f"{platform.system()} {platform.release()} {platform.machine()}"
    yield platform.freedesktop_os_release().get("PRETTY_NAME", "")
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"


def _render(value: Any) -> str:
    """Return a value of the configuration; of a secret only its place."""
    if type(value) in (tuple, frozenset):  # an address is a named one
        return ", ".join(map(_render, value)) or "none"
    return "none" if value is None or (isinstance(value, Secret) and not value) else str(value)


def _read_log() -> str:
    command = ["journalctl", "--unit=gpuwarden", f"--since=-{LOG_MINUTES}min", f"--lines={MAX_LOG_LINES}"]
    command += ["--no-hostname", "--no-pager", "--output=short-iso"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    return _OF_RUN.sub(_hide_texts, done.stdout) + done.stderr


def _hide_texts(line: re.Match[str]) -> str:
    return _PRIVATE_FIELD.sub(rf"\1={HIDDEN}", line[0])


def _ask(config: Config, read: Callable[[Address | Path], T]) -> T:
    """Return the daemon's answer: from its Unix socket, which needs no login, or from its address."""
    try:
        return read(config.web_socket)
    except OSError:
        return read(config.web.listen)


def _run_doctor() -> str:
    results = run_checks(Context(python=Path(sys.executable)))
    return json.dumps([asdict(each) for each in results], indent=1) + "\n"
