"""The command line: parses arguments, and turns failures into one clear message and an exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuwarden import logs
from gpuwarden._version import __version__
from gpuwarden.config import Config, ConfigError, load

log = logging.getLogger("gpuwarden")

FAILED, WRONG_USE = 1, 2
_FLAGS = {"source": "--source", "web.listen": "--listen", "runs.socket": "--socket"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 ended as asked, 1 failed, 2 wrong use or wrong configuration."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - before logging is configured, and meant for a person
        return WRONG_USE
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"gpuwarden: {text}", file=sys.stderr)  # noqa: T201 - likewise
        return FAILED
    except KeyboardInterrupt:
        return 128 + 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden", description="GPU hardware and training runs on one Prometheus endpoint."
    )
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon")
    _add_settings(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="where to serve HTTP (default 127.0.0.1:9846)")
    serve.add_argument("--socket", metavar="PATH", help="where runs report (default /run/gpuwarden/run.sock)")
    serve.set_defaults(command=_serve)

    once = commands.add_parser("once", help="print one scrape and end")
    _add_settings(once)
    once.set_defaults(command=_once, listen=None, socket=None)

    demo = commands.add_parser("demo", help="show a daemon, a real training and an alert on simulated GPUs")
    demo.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:9846", help="where the daemon serves HTTP")
    demo.set_defaults(command=_demo)

    check = commands.add_parser("check-config", help="check a configuration file")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_check_config)

    reference = commands.add_parser("reference", help="print a reference made from the code")
    reference.add_argument("what", choices=("metrics", "config", "example"))
    reference.set_defaults(command=_reference)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration; see config.example.yaml")
    parser.add_argument("--source", metavar="SOURCE", help="nvml (default), auto, simulated or capture:FILE")


def _load(parsed: argparse.Namespace) -> Config:
    """Read the configuration; a flag wins over the environment, that over the file."""
    overrides, origin = {}, dict(_FLAGS)
    if socket := os.environ.get("GPUWARDEN_SOCKET"):
        overrides["runs.socket"], origin["runs.socket"] = socket, "GPUWARDEN_SOCKET"
    for key, flag in _FLAGS.items():
        value = getattr(parsed, flag.removeprefix("--"))
        if value is not None:
            overrides[key], origin[key] = value, flag
    config = load(parsed.config, overrides, origin)
    logs.configure(config.log.level)
    return config


def _serve(parsed: argparse.Namespace) -> int:
    from gpuwarden.daemon import Daemon  # noqa: PLC0415 - check-config and reference need no daemon
    from gpuwarden.sources import open_source  # noqa: PLC0415 - likewise

    config = _load(parsed)
    daemon = Daemon(config, open_source(config.source, config.simulation))

    def say_where() -> None:
        host, port = daemon.web.address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("%s", daemon.status)
        log.info("status page %s/   metrics %s/metrics   runs report to %s", url, url, config.runs.socket)

    asyncio.run(daemon.run(say_where))
    return 0


def _once(parsed: argparse.Namespace) -> int:
    from gpuwarden.daemon import Daemon  # noqa: PLC0415 - as above
    from gpuwarden.sources import open_source  # noqa: PLC0415 - as above

    config = _load(parsed)
    logs.configure("warning")  # the page is the output
    daemon = Daemon(config, open_source(config.source, config.simulation))
    state = asyncio.run(daemon.poll())
    sys.stdout.write(daemon.text)
    return FAILED if state.snapshot.fault else 0


def _demo(parsed: argparse.Namespace) -> int:
    from gpuwarden.demo import stage  # noqa: PLC0415 - as above

    return stage.show(parsed.listen)


def _check_config(parsed: argparse.Namespace) -> int:
    load(parsed.file)
    print(f"{parsed.file}: OK")  # noqa: T201 - the command's answer
    return 0


def _reference(parsed: argparse.Namespace) -> int:
    if parsed.what == "metrics":
        from gpuwarden.reference import metrics_markdown as written  # noqa: PLC0415 - as above
    elif parsed.what == "config":
        from gpuwarden.config_reference import reference_markdown as written  # noqa: PLC0415 - as above
    else:
        from gpuwarden.config_reference import example_yaml as written  # noqa: PLC0415 - as above
    sys.stdout.write(written())
    return 0
