"""Parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpuwarden._version import __version__
from gpuwarden.cli.rules_command import add_flags, argument_type
from gpuwarden.config.value_types import DURATION, bounded

REFERENCES = {
    "metrics": "cli.reference.metrics_markdown",
    "config": "config.schema_docs.render_reference",
    "example": "config.schema_docs.render_example",
    "xid": "cli.reference.xid_markdown",
    "dcgm": "dcgm.dcgm_docs.dcgm_markdown",
    "receipt": "cli.reference.receipt_markdown",
    "state": "web.api.api_docs.render_reference",
    "verdicts": "cli.reference.verdicts_markdown",
    "alerts": "alerts.alert_docs.page",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, the process's own if None; its `command` is a name. Raises SystemExit after a message."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.exit(2, parser.format_help())
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden", description="GPU hardware and training runs on one Prometheus endpoint."
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon")
    _add_settings(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="where to serve HTTP (default 127.0.0.1:9846)")
    serve.add_argument("--socket", metavar="PATH", help="where runs report (default /run/gpuwarden/run.sock)")
    serve.set_defaults(command="serve")

    once = commands.add_parser("once", help="print one scrape and end")
    _add_settings(once)
    once.set_defaults(command="once")

    demo = commands.add_parser("demo", help="show a daemon, a real training and an alert on simulated GPUs")
    demo.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:9846", help="where the daemon serves HTTP")
    demo.set_defaults(command="demo")

    capture = commands.add_parser("capture", help="record the driver's answers, to replay with --source capture:FILE")
    _add_settings(capture)
    capture.add_argument("file", type=Path, metavar="FILE", help="what to write; compressed if it ends in .gz")
    capture.add_argument("--frames", type=int, default=10, metavar="N", help="how often to ask (default 10)")
    capture.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between (default 1)")
    capture.add_argument(
        "--mask",
        action="store_true",
        help="replace UUIDs, serial numbers, PCI addresses and pids, so that it can be shared",
    )
    capture.set_defaults(command="capture")

    pause = commands.add_parser("pause", help="have the daemon release the driver, so that a GPU can be reset")
    pause.add_argument(
        "--for", type=argument_type(bounded(DURATION, "1s", "24h")), default=1800.0, metavar="DURATION", dest="seconds",
        help="how long, unless gpuwarden resume ends it (default 30m, at most 24h)",
    )  # fmt: skip
    resume = commands.add_parser("resume", help="end a pause")
    for parser_of, command in ((pause, "pause"), (resume, "resume")):
        parser_of.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
        parser_of.add_argument("--control", metavar="PATH", help="its control socket (default: beside the runs' one)")
        parser_of.set_defaults(command=command)

    _add_runs(commands)

    top = commands.add_parser("top", help="show the box in the terminal, live: GPUs, runs, what is wrong")
    _add_asking(top)
    top.add_argument("--once", action="store_true", help="write one picture and end; with --json what the API says")
    top.set_defaults(command="top")

    rules = commands.add_parser("rules", help="print the alert rules for Prometheus, with other thresholds")
    add_flags(rules)
    rules.set_defaults(command="rules")

    notify = commands.add_parser("notify", help="send a test notification")
    notify.add_argument("--test", action="store_true", required=True, help="send each target a test message")
    notify.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
    notify.set_defaults(command="notify")

    check = commands.add_parser("check-config", help="check a configuration file")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command="check_config")

    reference = commands.add_parser("reference", help="print a reference made from the code")
    reference.add_argument("what", choices=REFERENCES)
    reference.set_defaults(command="reference")
    return parser


def _add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    runs = commands.add_parser("runs", help="list training runs, past ones too, or show one")
    _add_asking(runs)
    _add_choice(runs)
    runs.set_defaults(command="list_runs", which=("live", "past"))
    words = runs.add_subparsers(metavar="list | show")
    # Without defaults, which would replace the flags given before the word.
    some = words.add_parser("list", help="list them, as without a word", argument_default=argparse.SUPPRESS)
    _add_asking(some)
    _add_choice(some)
    show = words.add_parser("show", help="show all that is known of one", argument_default=argparse.SUPPRESS)
    show.add_argument("run", metavar="ID", type=_run_id, help="the run's id, or as much of its begin as no other has")
    _add_asking(show)
    show.set_defaults(command="show_run")


def _add_asking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where it serves HTTP (default 127.0.0.1:9846)")
    parser.add_argument("--json", action="store_true", help="in the form of docs/api.md")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--live", dest="which", action="store_const", const=("live",), help="those alone that go on")
    which.add_argument("--past", dest="which", action="store_const", const=("past",), help="those alone that ended")
    parser.add_argument("--limit", type=_positive, metavar="N", help="the newest N of both, or of those alone")


def _run_id(text: str) -> str:
    if not text.strip():  # a script's variable that is not set: each run's id begins like that
        raise argparse.ArgumentTypeError("want a run's id or its begin, not nothing; gpuwarden runs lists them")
    return text


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"want a number of 1 or more, not {text!r}")
    return int(text)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration; see config.example.yaml")
    parser.add_argument("--source", metavar="SOURCE", help="nvml (default), auto, simulated or capture:FILE")
