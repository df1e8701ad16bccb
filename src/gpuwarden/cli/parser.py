"""Parser of the command line: the commands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gpuwarden._version import __version__
from gpuwarden.cli.common.entry_points import REFERENCES
from gpuwarden.cli.rules_flags import add_rules_flags, argument_type
from gpuwarden.config.value_types import DURATION, bounded

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, the process's own if None; its `command` is one of COMMANDS.

    Raises SystemExit after a message.
    """
    parser = argparse.ArgumentParser(
        prog="gpuwarden", description="GPU hardware and training runs on one Prometheus endpoint."
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in _IN_ORDER:
        add(commands)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.exit(2, parser.format_help())
    return parsed


def _add_serve(commands: Commands) -> None:
    serve = _add_command(commands, "serve", "run the daemon")
    _add_source(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="where to serve HTTP (default 127.0.0.1:9846)")
    serve.add_argument("--socket", metavar="PATH", help="where runs report (default /run/gpuwarden/run.sock)")


def _add_once(commands: Commands) -> None:
    once = _add_command(commands, "once", "print one scrape and end")
    _add_source(once)


def _add_demo(commands: Commands) -> None:
    demo = _add_command(commands, "demo", "show a daemon, a real training and an alert on simulated GPUs")
    demo.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:9846", help="where the daemon serves HTTP")


def _add_capture(commands: Commands) -> None:
    capture = _add_command(commands, "capture", "record the driver's answers, to replay with --source capture:FILE")
    _add_source(capture)
    capture.add_argument("file", type=Path, metavar="FILE", help="what to write; compressed if it ends in .gz")
    capture.add_argument("--frames", type=int, default=10, metavar="N", help="how often to ask (default 10)")
    capture.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between (default 1)")
    capture.add_argument(
        "--mask",
        action="store_true",
        help="replace UUIDs, serial numbers, PCI addresses and pids, so that it can be shared",
    )


def _add_pause(commands: Commands) -> None:
    pause = _add_command(commands, "pause", "have the daemon release the driver, so that a GPU can be reset")
    pause.add_argument(
        "--for", type=argument_type(bounded(DURATION, "1s", "24h")), default=1800.0, metavar="DURATION",
        dest="seconds", help="how long, unless gpuwarden resume ends it (default 30m, at most 24h)",
    )  # fmt: skip
    _add_control(pause)


def _add_resume(commands: Commands) -> None:
    resume = _add_command(commands, "resume", "end a pause")
    _add_control(resume)


def _add_runs(commands: Commands) -> None:
    runs = _add_command(commands, "runs", "list training runs, past ones too, or show one")
    _add_daemon(runs)
    _add_choice(runs)
    runs.set_defaults(which=("live", "past"))
    words = runs.add_subparsers(metavar="list | show")
    # Without defaults, which would replace the flags given before the word.
    some = words.add_parser("list", help="list them, as without a word", argument_default=argparse.SUPPRESS)
    _add_daemon(some)
    _add_choice(some)
    show = words.add_parser("show", help="show all that is known of one", argument_default=argparse.SUPPRESS)
    show.add_argument("run", metavar="ID", type=_run_id, help="the run's id, or as much of its begin as no other has")
    _add_daemon(show)
    show.set_defaults(command="runs show")


def _add_top(commands: Commands) -> None:
    top = _add_command(commands, "top", "show the box in the terminal, live: GPUs, runs, what is wrong")
    _add_daemon(top)
    top.add_argument("--once", action="store_true", help="write one picture and end; with --json what the API says")


def _add_rules(commands: Commands) -> None:
    rules = _add_command(commands, "rules", "print the alert rules for Prometheus, with other thresholds")
    add_rules_flags(rules)


def _add_notify(commands: Commands) -> None:
    notify = _add_command(commands, "notify", "send a test notification")
    notify.add_argument("--test", action="store_true", required=True, help="send each target a test message")
    _add_config(notify)


def _add_check_config(commands: Commands) -> None:
    check = _add_command(commands, "check-config", "check a configuration file")
    check.add_argument("file", type=Path, metavar="FILE")


def _add_reference(commands: Commands) -> None:
    reference = _add_command(commands, "reference", "print a reference made from the code")
    reference.add_argument("what", choices=REFERENCES)


_IN_ORDER = (
    _add_serve,
    _add_once,
    _add_demo,
    _add_capture,
    _add_pause,
    _add_resume,
    _add_runs,
    _add_top,
    _add_rules,
    _add_notify,
    _add_check_config,
    _add_reference,
)


def _add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary)
    parser.set_defaults(command=name)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration; see config.example.yaml")
    parser.add_argument("--source", metavar="SOURCE", help="nvml (default), auto, simulated or capture:FILE")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")


def _add_control(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--control", metavar="PATH", help="its control socket (default: beside the runs' one)")


def _add_daemon(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="where it serves HTTP (default 127.0.0.1:9846)")
    parser.add_argument("--json", action="store_true", help="in the form of docs/reference/http-api.md")


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
