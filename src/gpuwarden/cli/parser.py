"""Command line: the table of commands, their options, examples and functions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TypeAlias

from gpuwarden._version import __version__
from gpuwarden.cli.common.argument_parser import SuggestingParser
from gpuwarden.cli.common.entry_points import REFERENCES
from gpuwarden.cli.rules_flags import add_rules_flags, argument_type
from gpuwarden.config.value_types import DURATION, bounded

SUMMARY = "Prometheus exporter for NVIDIA GPUs that also knows your training runs."
ENVIRONMENT = "Environment: GPUWARDEN_LISTEN=HOST:PORT (as --listen), GPUWARDEN_SOCKET=PATH"
Parsers: TypeAlias = "argparse._SubParsersAction[SuggestingParser]"  # noqa: SLF001 - argparse has no public name
SHELLS = ("bash", "zsh", "fish", "tcsh")


@dataclass(frozen=True, slots=True)
class Command:
    """Command; `function` is an entry point, and `add_options` adds its options to a parser."""

    name: str
    summary: str
    description: str
    examples: tuple[str, ...]
    function: str
    add_options: Callable[[SuggestingParser], None]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, the process's own if None; `function` of the result is the command's entry point.

    Raises SystemExit after the help, the version, or a message about a wrong argument.
    """
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.function is None:
        parser.print_help()
        parser.exit(0)
    return parsed


def make_parser() -> SuggestingParser:
    """Return the parser of the whole command line."""
    parser = _RootParser(
        prog="gpuwarden", usage="gpuwarden [--version] COMMAND [--help | OPTIONS]", description=SUMMARY
    )
    parser.set_defaults(function=None)
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", prog="gpuwarden", parser_class=SuggestingParser
    )
    for command in COMMANDS:
        added = _add_parser(commands, command.name, command.summary, command.examples)
        added.description = fill(command.description, 78)
        added.set_defaults(function=command.function)
        command.add_options(added)
    return parser


def _add_parser(
    parsers: Parsers, name: str, summary: str, examples: Sequence[str], defaults: str | None = None
) -> SuggestingParser:
    lines = ["examples:" if examples[1:] else "example:", *(f"  {each}" for each in examples)]
    return parsers.add_parser(
        name,
        help=summary,
        epilog="\n".join(lines),
        argument_default=defaults,
        formatter_class=_HelpFormatter,
        usage=f"gpuwarden {name} [OPTIONS]" if name == "rules" else None,  # its 40 options would take 30 lines
        allow_abbrev=False,
    )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


class _RootParser(SuggestingParser):
    def format_help(self) -> str:
        """Return a line with an example for each command: a terminal of 80 columns and 24 lines shows all of it."""
        rows = [f"  {each.name:<13}{each.summary:<32}{each.examples[0]}" for each in COMMANDS]
        return "\n".join([*self.format_usage().splitlines(), SUMMARY, *rows, ENVIRONMENT, ""])


def _add_serve(parser: SuggestingParser) -> None:
    _add_source(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to serve HTTP on (default 127.0.0.1:9846)")
    parser.add_argument(
        "--socket", metavar="PATH", help="socket that training runs report to (default /run/gpuwarden/run.sock)"
    )


def _add_demo(parser: SuggestingParser) -> None:
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of the demo's daemon (default 127.0.0.1:9846)")


def _add_capture(parser: SuggestingParser) -> None:
    _add_source(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="file to write; compressed if its name ends in .gz")
    parser.add_argument("--frames", type=int, default=10, metavar="N", help="number of frames to record (default 10)")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between frames (default 1)"
    )
    parser.add_argument(
        "--mask",
        action="store_true",
        help="replace UUIDs, serial numbers, PCI addresses and pids, so that the file can be shared",
    )


def _add_debug_bundle(parser: SuggestingParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="file to write (default: gpuwarden-debug-TIME.tar.gz, here)"
    )
    parser.add_argument(
        "--capture", action="store_true", help="also record what the driver reports, as gpuwarden capture --mask does"
    )


def _add_pause(parser: SuggestingParser) -> None:
    parser.add_argument(
        "--for",
        type=argument_type(bounded(DURATION, "1s", "24h")),
        default=1800.0,
        metavar="DURATION",
        dest="seconds",
        help="length of the pause (default 30m, maximum 24h)",
    )
    _add_control(parser)


def _add_check(parser: SuggestingParser) -> None:
    parser.wrong_use_status = 3  # 2 is unfit: a misspelled option must not drain a node
    stage = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("prolog", "before a job, as Slurm's prolog: its GPUs must be free; the exit status is 0 unless unfit"),
        ("epilog", "after a job, as Slurm's epilog: its GPUs must be free again; the exit status is 0 unless unfit"),
        ("preflight", "before a training: its GPUs must be free"),
    ):
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, help=meaning)
    parser.set_defaults(stage="none")
    parser.add_argument("--strict", action="store_true", help="exit with 1 and 3 in --prolog and --epilog, too")
    parser.add_argument(
        "--gpus", metavar="GPU,...", help="UUIDs or indexes (default: with a stage, those of the job; else all)"
    )
    parser.add_argument(
        "--off", action="append", default=[], metavar="CHECK,...", help="checks to leave out; docs/reference/checks.md"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the answer as JSON")
    output.add_argument("--nagios", action="store_true", help="print one line for Nagios, with performance data")
    _add_control(parser)


def _add_run(parser: SuggestingParser) -> None:
    _add_config(parser)
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: the script's or the program's)")
    parser.add_argument(
        "--census", action="store_true", help="when memory leaks or runs short, find what keeps the tensors"
    )
    parser.add_argument("--card", type=Path, metavar="FILE", help="write the card to a file too: FILE.txt or FILE.json")
    parser.add_argument(
        "--no-stderr", action="store_true", help="leave standard error alone: the card has no words of the program"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="program and its arguments, run as they are"
    )


def _add_doctor(parser: SuggestingParser) -> None:
    _add_config(parser)
    _add_python(parser)
    parser.add_argument("--read", type=Path, metavar="PATH", help="measure the read speed of this file or folder")
    parser.add_argument(
        "--run", action="store_true", help="also run each framework on each GPU; takes a minute and 1 GiB of its memory"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_explain(parser: SuggestingParser) -> None:
    parser.add_argument("what", nargs="?", metavar="FILE|RUN", help="log file or ID of a run (default: standard input)")
    _add_python(parser)
    parser.add_argument("--no-checks", action="store_true", help="the log is of another machine: do not check this one")
    _add_listen(parser)
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def _add_runs(parser: SuggestingParser) -> None:
    _add_daemon(parser)
    _add_choice(parser)
    parser.set_defaults(which=("live", "past"))
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    # Without defaults: they would replace the options given before the action.
    listed = _add_parser(actions, "list", "list runs (default)", ["gpuwarden runs list --live"], argparse.SUPPRESS)
    _add_daemon(listed)
    _add_choice(listed)
    show = _add_parser(actions, "show", "show one run in detail", ["gpuwarden runs show 4711"], argparse.SUPPRESS)
    show.add_argument(
        "run",
        metavar="ID",
        type=_id_type("run"),
        help="run ID, a unique prefix of it, last (the newest), or how a name begins (its newest run)",
    )
    _add_daemon(show)
    show.set_defaults(function="cli.runs.runs_command:show_run")


def _add_last(parser: SuggestingParser) -> None:
    _add_daemon(parser)
    parser.set_defaults(run="last")


def _add_incidents(parser: SuggestingParser) -> None:
    _add_daemon(parser)
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the newest N incidents (default 100)")
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    show = _add_parser(
        actions,
        "show",
        "show an incident in detail",
        ["gpuwarden incidents show last", "gpuwarden incidents show last --json > incident.json"],
        argparse.SUPPRESS,
    )
    show.add_argument(
        "incident",
        metavar="ID|FILE",
        type=_id_type("incident"),
        help="incident ID, a unique prefix of it, last (the newest), or a file written with --json",
    )
    _add_daemon(show)
    show.set_defaults(function="cli.incidents.incidents_command:show_incident")
    record = _add_parser(
        actions,
        "record",
        "record an incident now",
        ['gpuwarden incidents record "step time doubled"'],
        argparse.SUPPRESS,
    )
    record.add_argument("note", nargs="?", default="", metavar="TEXT", help="text to keep with it")
    _add_control(record)
    record.set_defaults(function="cli.commands.control_command:record_incident")


def _add_top(parser: SuggestingParser) -> None:
    _add_daemon(parser)
    parser.add_argument("--once", action="store_true", help="print once and exit; --json implies it")


def _add_notify(parser: SuggestingParser) -> None:
    parser.add_argument("--test", action="store_true", required=True, help="send a test notification to each target")
    _add_config(parser)


def _add_check_config(parser: SuggestingParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML configuration to check")


def _add_reference(parser: SuggestingParser) -> None:
    parser.add_argument("what", choices=tuple(REFERENCES), metavar="REFERENCE", help=", ".join(REFERENCES))


def _add_completion(parser: SuggestingParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_source(parser: SuggestingParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help="nvml (default), auto (simulated GPUs if there is no driver), simulated or capture:FILE",
    )


def _add_config(parser: SuggestingParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file of the daemon")


def _add_control(parser: SuggestingParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--control", metavar="PATH", help="control socket of the daemon (default /run/gpuwarden/control.sock)"
    )


def _add_python(parser: SuggestingParser) -> None:
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="python of the training environment (default: of the active one), e.g. ENV/bin/python",
    )


def _add_listen(parser: SuggestingParser) -> None:
    _add_config(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of the daemon (default 127.0.0.1:9846)")


def _add_daemon(parser: SuggestingParser) -> None:
    _add_listen(parser)
    parser.add_argument("--json", action="store_true", help="print the API's JSON; see docs/reference/http-api.md")


def _add_choice(parser: SuggestingParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--live", dest="which", action="store_const", const=("live",), help="only running")
    which.add_argument("--past", dest="which", action="store_const", const=("past",), help="only finished")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the newest N running and newest N finished")


def _id_type(kind: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not text.strip():  # an unset variable in a script; every ID starts with it
            raise argparse.ArgumentTypeError(f"{kind} ID is empty; list the IDs with: gpuwarden {kind}s")
        return text

    return check


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


COMMANDS = (
    Command(
        "serve",
        "run the daemon",
        "Run the daemon: poll the GPUs, receive reports from training runs, and serve "
        "/metrics, the status page and the JSON API. Stop it with Ctrl-C or SIGTERM.",
        ("gpuwarden serve --source auto", "gpuwarden serve --config /etc/gpuwarden/config.yaml"),
        "cli.commands.hang_up:serve",
        _add_serve,
    ),
    Command(
        "top",
        "show GPUs and runs, live",
        "Show GPUs, training runs and problems in the terminal, live. Quit with q.",
        ("gpuwarden top", "gpuwarden top --once", "gpuwarden top --json | jq '.gpus[].headroom_bytes'"),
        "cli.top.top_command:run",
        _add_top,
    ),
    Command(
        "runs",
        "list training runs, or show one",
        "List training runs, running and finished, or show one in detail: its memory "
        "over time, errors, energy, and the diagnosis of an out-of-memory error.",
        ("gpuwarden runs show 4711-99", "gpuwarden runs --live", "gpuwarden runs --past --limit 5 --json"),
        "cli.runs.runs_command:list_runs",
        _add_runs,
    ),
    Command(
        "last",
        "show the newest run",
        "Show the newest run, as `gpuwarden runs show last` does.",
        ("gpuwarden last",),
        "cli.runs.runs_command:show_run",
        _add_last,
    ),
    Command(
        "run",
        "run a program, say how it ended",
        "Run a program as it is, with its training watched: Keras, torch, JAX and TensorFlow without a line of code, "
        "any other program by its GPUs. When it has ended, print a card to standard error: outcome and cause, memory, "
        "step time, input wait, throttling, energy, next step. The exit status and signals are the program's own. "
        "Without a daemon on this machine it starts a private one.",
        ("gpuwarden run -- python train.py", "gpuwarden run --card card.json -- torchrun train.py"),
        "launcher.run_command:run",
        _add_run,
    ),
    Command(
        "doctor",
        "check driver and environment",
        "Check this machine and a training environment: driver, GPUs, permissions, framework, memory, input. "
        "Each problem comes with the command that mends it. The exit status is 1 if a check fails. Needs no daemon.",
        (
            "gpuwarden doctor",
            "gpuwarden doctor --python ENV/bin/python",
            "gpuwarden doctor --read /data --json",
            "gpuwarden doctor --run",
        ),
        "cli.commands.doctor_command:run",
        _add_doctor,
    ),
    Command(
        "check",
        "say if the node is fit for jobs",
        "Ask the daemon if this node, or some of its GPUs, are fit for a job. Prints one line. The exit status is 0 if "
        "fit, 1 for a warning, 2 if unfit, 3 if unknown, as without a daemon.",
        (
            "gpuwarden check",
            "gpuwarden check --prolog --off persistence",
            "gpuwarden check --preflight --gpus 0,1",
            "gpuwarden check --nagios",
        ),
        "cli.commands.check_command:run",
        _add_check,
    ),
    Command(
        "explain",
        "explain an error or a log",
        "Explain the errors of a log: the first cause before its consequences, the likely causes with evidence from "
        "this machine, and what to do first. Reads a file, a run, or standard input. The exit status is 1 if it finds "
        "no error that it knows.",
        ("gpuwarden explain train.log", "python train.py 2>&1 | gpuwarden explain", "gpuwarden explain 4711-99"),
        "cli.commands.explain_command:run",
        _add_explain,
    ),
    Command(
        "incidents",
        "list incidents, or show one",
        "List what went wrong, the newest first, or show an incident in detail: the finding in plain words, a "
        "timeline, charts, processes, runs, XIDs and the kernel log.",
        ("gpuwarden incidents show last", "gpuwarden incidents --limit 5 --json", "gpuwarden incidents record"),
        "cli.incidents.incidents_command:list_incidents",
        _add_incidents,
    ),
    Command(
        "once",
        "print the metrics once",
        "Poll the GPUs once and print the metrics, without a daemon. The exit status is 1 "
        "if the driver does not answer.",
        ("gpuwarden once | grep memory", "gpuwarden once --source simulated"),
        "cli.commands.serve_command:once",
        _add_source,
    ),
    Command(
        "pause",
        "release the NVIDIA driver",
        "Make the daemon release the NVIDIA driver, e.g. to reset a GPU or to update the "
        "driver. It polls no GPU until the pause ends.",
        ("gpuwarden pause --for 10m",),
        "cli.commands.control_command:pause",
        _add_pause,
    ),
    Command(
        "resume",
        "end a pause",
        "End a pause before its time.",
        ("gpuwarden resume",),
        "cli.commands.control_command:resume",
        _add_control,
    ),
    Command(
        "check-config",
        "check a configuration file",
        "Check a configuration file: every mistake with its line, column and remedy. "
        "The exit status is 2 if there is one. For a correct file it prints the number of series that 8 GPUs have.",
        ("gpuwarden check-config my.yaml",),
        "cli.commands.check_config_command:run",
        _add_check_config,
    ),
    Command(
        "notify",
        "send a test notification",
        "Send a test notification to each target below `notify:` in the configuration, and report which ones failed.",
        ("gpuwarden notify --test",),
        "cli.commands.notify_command:run",
        _add_notify,
    ),
    Command(
        "rules",
        "print Prometheus alert rules",
        "Print the alert rules for Prometheus, with thresholds of your own, or write the Grafana dashboards. "
        "Durations are written 30s, 10m or 1h, ratios 5% or 0.05.",
        (
            "gpuwarden rules > rules.yml",
            "gpuwarden rules --near-oom-ratio 10% --idle 1h",
            "gpuwarden rules --kubernetes",
            "gpuwarden rules --dashboards dashboards",
        ),
        "cli.commands.rules_command:run",
        add_rules_flags,
    ),
    Command(
        "capture",
        "record what the driver reports",
        "Record what the driver reports to a file. `--source capture:FILE` replays it on a "
        "machine without a GPU, e.g. to reproduce a bug.",
        ("gpuwarden capture --mask gpus.gz", "gpuwarden serve --source capture:gpus.gz"),
        "cli.commands.capture_command:run",
        _add_capture,
    ),
    Command(
        "debug-bundle",
        "collect facts for a bug report",
        "Write one file for a bug report: versions, configuration without secrets, the log of the last ten minutes, "
        "metrics, state, and the doctor's results. UUIDs, addresses, paths, and names of users, hosts and runs are "
        "masked; it lists the files, and what is not masked.",
        ("gpuwarden debug-bundle", "sudo gpuwarden debug-bundle --capture --config /etc/gpuwarden/config.yaml"),
        "cli.commands.debug_bundle_command:run",
        _add_debug_bundle,
    ),
    Command(
        "reference",
        "print a reference page",
        "Print a reference page in Markdown, generated from the code.",
        ("gpuwarden reference metrics",),
        "cli.commands.reference_command:run",
        _add_reference,
    ),
    Command(
        "completion",
        "print shell completion",
        "Print the completion script of a shell.",
        (
            "gpuwarden completion bash",
            'eval "$(gpuwarden completion bash)"',
            "gpuwarden completion fish > ~/.config/fish/completions/gpuwarden.fish",
        ),
        "cli.commands.completion_command:run",
        _add_completion,
    ),
    Command(
        "demo",
        "see an alert on simulated GPUs",
        "Run a daemon on simulated GPUs and a real Keras training that runs out of memory: "
        "the forecast, the alert in Prometheus (if installed) and the diagnosis.",
        ("gpuwarden demo",),
        "demo.demonstration:run",
        _add_demo,
    ),
)
