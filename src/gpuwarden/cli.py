"""The command line: parses arguments, and turns failures into one clear message and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import event_loop, loading, logs, malloc
from gpuwarden._version import __version__
from gpuwarden.config import Config, ConfigError, load

if TYPE_CHECKING:
    from gpuwarden.sources import Source

log = logging.getLogger("gpuwarden")

FAILED, WRONG_USE = 1, 2
_REFERENCES = {
    "metrics": "reference.metrics_markdown",
    "config": "config_reference.reference_markdown",
    "example": "config_reference.example_yaml",
    "xid": "reference.xid_markdown",
    "dcgm": "dcgm.reference.dcgm_markdown",
    "receipt": "reference.receipt_markdown",
    "state": "api.reference.state_markdown",
    "verdicts": "reference.verdicts_markdown",
    "alerts": "alerts.page.page",
}
_FLAGS = {
    "source": "--source",
    "web.listen": "--listen",
    "runs.socket": "--socket",
    "control.socket": "--control",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 ended as asked, 1 failed, 2 wrong use or wrong configuration."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - before logging is configured, and meant for a person
        return WRONG_USE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # the system's own errors do not say it in their text
        print(f"gpuwarden: {where}{error.strerror or error}", file=sys.stderr)  # noqa: T201 - likewise
        return FAILED
    except KeyboardInterrupt:
        return 128 + 2


class _Parser(argparse.ArgumentParser):
    """Writes help for 80 columns: argparse asks shutil for the terminal's at each argument, which takes 0.5 MiB.

    `late` adds arguments once the parser is used: what they are made from is not loaded for another command.
    """

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=partial(argparse.HelpFormatter, width=78))

    def parse_known_args(self, *arguments: Any, **settings: Any) -> Any:
        """Parse as ever."""
        if self.late is not None:
            self.late(self)
        return super().parse_known_args(*arguments, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gpuwarden", description="GPU hardware and training runs on one Prometheus endpoint.")
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
    capture.set_defaults(command=_capture, listen=None, socket=None)

    pause = commands.add_parser("pause", help="have the daemon let go of the driver, so that a GPU can be reset")
    pause.add_argument(
        "--for", type=_duration, default=1800.0, metavar="DURATION", dest="seconds",
        help="how long, unless gpuwarden resume ends it (default 30m, at most 24h)",
    )  # fmt: skip
    resume = commands.add_parser("resume", help="end a pause")
    for parser_of, command in ((pause, _pause), (resume, _resume)):
        parser_of.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
        parser_of.add_argument("--control", metavar="PATH", help="its control socket (default: beside the runs' one)")
        parser_of.set_defaults(command=command)

    _add_runs(commands)

    top = commands.add_parser("top", help="show the box in the terminal, live: GPUs, runs, what is wrong")
    _add_asking(top)
    top.add_argument("--once", action="store_true", help="write one picture and end; with --json what the API says")
    top.set_defaults(command=_top)

    rules = commands.add_parser("rules", help="print the alert rules for Prometheus, with other thresholds")
    rules.late = _add_rule_flags
    rules.set_defaults(command=_rules)

    notify = commands.add_parser("notify", help="try the ways by which people are told of alerts")
    notify.add_argument("--test", action="store_true", required=True, help="send each target a test message")
    notify.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
    notify.set_defaults(command=_notify)

    check = commands.add_parser("check-config", help="check a configuration file")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_check_config)

    reference = commands.add_parser("reference", help="print a reference made from the code")
    reference.add_argument("what", choices=_REFERENCES)
    reference.set_defaults(command=_reference)
    return parser


def _add_runs(commands: argparse._SubParsersAction[_Parser]) -> None:
    runs = commands.add_parser("runs", help="list training runs, past ones too, or show one")
    _add_asking(runs)
    _add_choice(runs)
    runs.set_defaults(command=_list_runs, config=None, listen=None, json=False, which=("live", "past"), limit=None)
    # A default would be set anew by the word after `runs`, over what stands before it.
    words = runs.add_subparsers(metavar="list | show")
    unsaid = argparse.SUPPRESS
    some = words.add_parser("list", help="list them: what runs without a word does", argument_default=unsaid)
    _add_asking(some)
    _add_choice(some)
    show = words.add_parser("show", help="show all that is known of one", argument_default=unsaid)
    show.add_argument("run", metavar="ID", help="the run's id, or as much of its begin as no other has")
    _add_asking(show)
    show.set_defaults(command=_show_run)


def _add_asking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's configuration")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where it serves HTTP (default 127.0.0.1:9846)")
    parser.add_argument("--json", action="store_true", help="in the form of docs/api.md")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--live", dest="which", action="store_const", const=("live",), help="those alone that go on")
    which.add_argument("--past", dest="which", action="store_const", const=("past",), help="those alone that ended")
    parser.add_argument("--limit", type=_positive, metavar="N", help="the newest N of both, or of those alone")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"want a number of 1 or more, not {text!r}")
    return int(text)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration; see config.example.yaml")
    parser.add_argument("--source", metavar="SOURCE", help="nvml (default), auto, simulated or capture:FILE")


def _load(parsed: argparse.Namespace) -> Config:
    """Read the configuration; a flag wins over the environment, that over the file."""
    overrides, origin = {}, dict(_FLAGS)
    if socket := os.environ.get("GPUWARDEN_SOCKET"):
        overrides["runs.socket"], origin["runs.socket"] = socket, "GPUWARDEN_SOCKET"
    for key, flag in _FLAGS.items():
        value = getattr(parsed, flag.removeprefix("--"), None)
        if value is not None:
            overrides[key], origin[key] = value, flag
    config = load(parsed.config, overrides, origin)
    logs.configure(config.log.level)
    return config


def _open(config: Config) -> Source:
    from gpuwarden.sources import open_source  # noqa: PLC0415 - check-config and reference need none

    try:
        return open_source(config.source, config.simulation)
    except (ValueError, ImportError) as error:  # a capture or a binding that cannot be used
        raise OSError(None, str(error)) from None


def _serve(parsed: argparse.Namespace) -> int:
    malloc.keep_small()
    config = _load(parsed)
    loading.forget("yaml")  # before the rest is loaded, which takes the room: 0.9 MiB
    from gpuwarden.daemon import Daemon  # noqa: PLC0415 - as above

    _allow_open_files()
    daemon = Daemon(config, _open(config))

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

    if event_loop.run(daemon.run(say_where)):
        log.warning("the driver's library was replaced: starting anew, to load the one that is there now")
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very program, as it was started
    return 0


def _allow_open_files() -> None:
    """Use the open files the system allows: runs and clients that hold many must not lock out a scrape."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _once(parsed: argparse.Namespace) -> int:
    from gpuwarden.daemon import Daemon  # noqa: PLC0415 - as above

    config = _load(parsed)
    logs.configure("warning")  # the page is the output
    daemon = Daemon(config, _open(config))
    state = event_loop.run(daemon.poll())
    sys.stdout.write(daemon.text)
    return FAILED if state.snapshot.fault else 0


def _demo(parsed: argparse.Namespace) -> int:
    from gpuwarden.demo import stage  # noqa: PLC0415 - as above

    return stage.show(parsed.listen)


def _capture(parsed: argparse.Namespace) -> int:
    from gpuwarden.gpu.advice import advice  # noqa: PLC0415 - as above
    from gpuwarden.gpu.nvml import NVMLError, error_name  # noqa: PLC0415 - as above
    from gpuwarden.gpu.reader import Plan  # noqa: PLC0415 - as above
    from gpuwarden.sources.capture import save  # noqa: PLC0415 - as above
    from gpuwarden.sources.masking import masked  # noqa: PLC0415 - as above
    from gpuwarden.sources.recording import record  # noqa: PLC0415 - as above

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
    save(masked(recorded) if parsed.mask else recorded, parsed.file)
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


def _duration(text: str) -> float:
    """Read a duration as the configuration writes it, for argparse."""
    from gpuwarden.config_values import DURATION, between  # noqa: PLC0415 - as above

    try:
        return between(DURATION, "1s", "24h").read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pause(parsed: argparse.Namespace) -> int:
    return _command(parsed, f"pause {parsed.seconds:g}")


def _resume(parsed: argparse.Namespace) -> int:
    return _command(parsed, "resume")


def _command(parsed: argparse.Namespace, request: str) -> int:
    from gpuwarden.control import ask  # noqa: PLC0415 - as above

    done, text = ask(_load(parsed).control_socket, request)
    print(text if done else f"gpuwarden: {text}", file=sys.stdout if done else sys.stderr)
    return 0 if done else FAILED


def _list_runs(parsed: argparse.Namespace) -> int:
    from gpuwarden import run_commands  # noqa: PLC0415 - as above

    return _write(run_commands.listing(_load(parsed), parsed.which, parsed.limit, as_json=parsed.json))


def _show_run(parsed: argparse.Namespace) -> int:
    from gpuwarden import run_commands  # noqa: PLC0415 - as above

    return _write(run_commands.one(_load(parsed), parsed.run, as_json=parsed.json))


def _top(parsed: argparse.Namespace) -> int:
    if parsed.json and not parsed.once:
        print("gpuwarden: top --json goes with --once", file=sys.stderr)  # noqa: T201 - meant for a person
        return WRONG_USE
    from gpuwarden.top import command  # noqa: PLC0415 - as above

    config = _load(parsed)
    return command.once(config, as_json=parsed.json) if parsed.once else command.live(config)


def _write(text: str) -> int:
    """Write what may hold any name, also where the terminal knows ASCII alone."""
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
    return 0


def _add_rule_flags(parser: argparse.ArgumentParser) -> None:
    from gpuwarden.alerts import command  # noqa: PLC0415 - as above

    command.add_flags(parser)


def _rules(parsed: argparse.Namespace) -> int:
    from gpuwarden.alerts import command  # noqa: PLC0415 - as above

    try:
        return _write(command.written(parsed))
    except ValueError as error:
        print(f"gpuwarden rules: error: {error}", file=sys.stderr)  # noqa: T201 - as argparse says it
        return WRONG_USE


def _notify(parsed: argparse.Namespace) -> int:
    from gpuwarden.alerts.notify import command  # noqa: PLC0415 - as above

    failed = command.test(_load(parsed).notify, lambda line: print(line, flush=True))  # noqa: T201 - the command's answer
    if failed is None:
        print("gpuwarden: nobody is to be told: name a target below `notify:` in the configuration", file=sys.stderr)  # noqa: T201
        return WRONG_USE
    return FAILED if failed else 0


def _check_config(parsed: argparse.Namespace) -> int:
    from gpuwarden.alerts.readiness import warnings  # noqa: PLC0415 - as above

    for warning in warnings(load(parsed.file)):
        print(f"{parsed.file}: warning: {warning}", file=sys.stderr)  # noqa: T201 - as above
    print(f"{parsed.file}: OK")  # noqa: T201 - the command's answer
    return 0


def _reference(parsed: argparse.Namespace) -> int:
    module, name = _REFERENCES[parsed.what].rsplit(".", 1)
    written: Callable[[], str] = getattr(import_module(f"gpuwarden.{module}"), name)
    sys.stdout.write(written())
    return 0
