"""Commands: each returns its exit status, and a failure is one clear message."""

# ruff: noqa: PLC0415  a command loads what it needs: the daemon, rich or an HTTP client take 2 to 15 MiB each

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from gpuwarden.cli.parser import REFERENCES, parse
from gpuwarden.config.schema import Config, ConfigError, load
from gpuwarden.daemon import asyncio_without_ssl, log_setup

if TYPE_CHECKING:
    import argparse

    from gpuwarden.daemon.daemon import Daemon
    from gpuwarden.daemon.sources import Source

log = logging.getLogger("gpuwarden")

FAILED, WRONG_USE = 1, 2
_FLAGS = {
    "source": "--source",
    "web.listen": "--listen",
    "runs.socket": "--socket",
    "control.socket": "--control",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 ended as asked, 1 failed, 2 wrong use or wrong configuration."""
    parsed = parse(arguments)
    try:
        return _COMMANDS[parsed.command](parsed)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - before logging is configured, and meant for a person
        return WRONG_USE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # the system's own errors do not say it in their text
        print(f"gpuwarden: {where}{error.strerror or error}", file=sys.stderr)  # noqa: T201 - likewise
        return FAILED
    except KeyboardInterrupt:
        return 128 + 2


def _load(parsed: argparse.Namespace) -> Config:
    """Read the configuration; a flag wins over the environment, that over the file."""
    overrides, origin = {}, dict(_FLAGS)
    if socket := os.environ.get("GPUWARDEN_SOCKET"):
        overrides["runs.socket"], origin["runs.socket"] = socket, "GPUWARDEN_SOCKET"
    for key, flag in _FLAGS.items():
        value = getattr(parsed, flag.removeprefix("--"), None)
        if value is not None:
            overrides[key], origin[key] = value, flag
    config = load(parsed.config, overrides, origin, _alert_names())
    log_setup.configure(config.log.level)
    return config


def _alert_names() -> Collection[str]:
    from gpuwarden.health.conditions import CONDITIONS

    return CONDITIONS.keys()


def _open(config: Config) -> Source:
    from gpuwarden.daemon.sources import open_source

    try:
        return open_source(config.source, config.simulation)
    except (ValueError, ImportError) as error:  # a capture or a binding that cannot be used
        raise OSError(None, str(error)) from None


def _daemon(config: Config) -> Daemon:
    if not config.alerting:  # who sends alerts may need TLS
        asyncio_without_ssl.load()
    from gpuwarden.daemon.daemon import Daemon

    return Daemon(config, _open(config))


def _serve(parsed: argparse.Namespace) -> int:
    config = _load(parsed)
    _allow_open_files()
    daemon = _daemon(config)
    import asyncio  # after asyncio_without_ssl

    def say_where() -> None:
        host, port = daemon.web.address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("%s", daemon.status)
        # A line each: a terminal of 80 columns would break an address in two.
        log.info("status page %s/", url)
        log.info("metrics %s/metrics", url)
        path = config.runs.socket
        log.info("runs report to %s", path)
        if path != Config().runs.socket:
            log.info("where they run: export GPUWARDEN_SOCKET=%s", path)

    asyncio.run(daemon.run(say_where))
    return 0


def _allow_open_files() -> None:
    """Use the open files the system allows: runs and clients that hold many must not lock out a scrape."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _once(parsed: argparse.Namespace) -> int:
    config = _load(parsed)
    log_setup.configure("warning")  # the page is the output
    daemon = _daemon(config)
    import asyncio  # after asyncio_without_ssl

    state = asyncio.run(daemon.poll())
    sys.stdout.write(daemon.text)
    return FAILED if state.snapshot.fault else 0


def _demo(parsed: argparse.Namespace) -> int:
    from gpuwarden.demo import demonstration

    return demonstration.run_demonstration(parsed.listen)


def _capture(parsed: argparse.Namespace) -> int:
    from gpuwarden.capture.capture_file import save_capture
    from gpuwarden.capture.masking import mask_capture
    from gpuwarden.capture.recording import record
    from gpuwarden.gpu.reader import Plan
    from gpuwarden.nvml.binding import NVMLError, error_name
    from gpuwarden.nvml.troubleshooting import advice

    config = _load(parsed)
    if not os.access(parsed.file.parent, os.W_OK):  # not only after the last frame
        raise OSError(None, f"{parsed.file} cannot be written: no such folder, or not yours to write to")
    if parsed.file.is_dir():
        raise OSError(None, f"{parsed.file} is a folder: name a file in it")
    try:
        source = _open(config)
        plan = Plan(opted_in=config.gpus.opted_in)
        with _interruptible():
            recorded = record(source.nvml, parsed.frames, parsed.interval, plan=plan, host_memory=source.host_memory)
    except NVMLError as error:
        what_to_do = "; ".join(filter(None, [str(error), advice(error_name(error))]))
        raise OSError(None, f"nothing can be recorded: {what_to_do}") from None
    except ValueError as error:
        print(f"gpuwarden: nothing can be recorded: {error}", file=sys.stderr)  # noqa: T201 - meant for a person
        return WRONG_USE
    save_capture(mask_capture(recorded) if parsed.mask else recorded, parsed.file)
    gpus = len(recorded.frames[-1].gpus)
    print(f"{parsed.file}: {len(recorded.frames)} frames of {gpus} GPUs; replay with --source capture:{parsed.file}")  # noqa: T201 - the command's answer
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python would wait for the end of a call, and a driver's may hang."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _pause(parsed: argparse.Namespace) -> int:
    return _command(parsed, f"pause {parsed.seconds:g}")


def _resume(parsed: argparse.Namespace) -> int:
    return _command(parsed, "resume")


def _command(parsed: argparse.Namespace, request: str) -> int:
    from gpuwarden.daemon.control import send_command

    done, text = send_command(_load(parsed).control_socket, request)
    print(text if done else f"gpuwarden: {text}", file=sys.stdout if done else sys.stderr)
    return 0 if done else FAILED


def _list_runs(parsed: argparse.Namespace) -> int:
    from gpuwarden.cli import run_commands

    return _write(run_commands.listing(_load(parsed), parsed.which, parsed.limit, as_json=parsed.json))


def _show_run(parsed: argparse.Namespace) -> int:
    from gpuwarden.cli import run_commands

    return _write(run_commands.one(_load(parsed), parsed.run, as_json=parsed.json))


def _top(parsed: argparse.Namespace) -> int:
    if parsed.json and not parsed.once:
        print("gpuwarden: top --json goes with --once", file=sys.stderr)  # noqa: T201 - meant for a person
        return WRONG_USE
    from gpuwarden.cli.top import top_command

    config = _load(parsed)
    return top_command.once(config, as_json=parsed.json) if parsed.once else top_command.live(config)


def _write(text: str) -> int:
    """Write what may hold any name, also where the terminal knows ASCII alone."""
    try:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # a reader such as head has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
    return 0


def _rules(parsed: argparse.Namespace) -> int:
    from gpuwarden.cli import rules_command

    try:
        return _write(rules_command.render_rules(parsed))
    except ValueError as error:
        print(f"gpuwarden rules: error: {error}", file=sys.stderr)  # noqa: T201 - as argparse says it
        return WRONG_USE


def _notify(parsed: argparse.Namespace) -> int:
    from gpuwarden.cli import notify_command

    failed = notify_command.send_test(_load(parsed).notify, lambda line: print(line, flush=True))  # noqa: T201 - the command's answer
    if failed is None:
        print("gpuwarden: no notification target is configured: add one under `notify:`", file=sys.stderr)  # noqa: T201
        return WRONG_USE
    return FAILED if failed else 0


def _check_config(parsed: argparse.Namespace) -> int:
    from gpuwarden.alerts.delivery.validation import warnings

    for warning in warnings(load(parsed.file, alert_names=_alert_names())):
        print(f"{parsed.file}: warning: {warning}", file=sys.stderr)  # noqa: T201 - as above
    print(f"{parsed.file}: OK")  # noqa: T201 - the command's answer
    return 0


def _reference(parsed: argparse.Namespace) -> int:
    module, name = REFERENCES[parsed.what].rsplit(".", 1)
    written: Callable[[], str] = getattr(import_module(f"gpuwarden.{module}"), name)
    sys.stdout.write(written())
    return 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "capture": _capture,
    "check_config": _check_config,
    "demo": _demo,
    "list_runs": _list_runs,
    "notify": _notify,
    "once": _once,
    "pause": _pause,
    "reference": _reference,
    "resume": _resume,
    "rules": _rules,
    "serve": _serve,
    "show_run": _show_run,
    "top": _top,
}
