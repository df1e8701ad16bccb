"""The configuration: every option declared once, for its checks here and its documents in `config_reference`.

Durations are float seconds and sizes int bytes once read. Nothing here changes after it is read.
"""

# ruff: noqa: RUF009  option() makes the dataclass field that the rule asks for

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwarden import config_file
from gpuwarden.config_file import Entry, Problem
from gpuwarden.config_values import (
    ADDRESS,
    BOOLEAN,
    CONTROL_PATH,
    DURATION,
    GROUP,
    MODE,
    OPTIONAL_PATH,
    PATH,
    SIZE,
    SOCKET_PATH,
    SOURCE,
    WHOLE,
    Address,
    Group,
    Kind,
    OptionalPath,
    Source,
    between,
    choice,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "NO_OWNERS",
    "OPTIONS",
    "SECTIONS",
    "Address",
    "Config",
    "ConfigError",
    "Problem",
    "Source",
    "load",
    "parse",
]

T = TypeVar("T")


class ConfigError(Exception):
    """The configuration is wrong; `problems` says all that is, in the order of their places."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Option:
    """What is declared of one option; `default` is written as in the file."""

    kind: Kind[Any]
    default: str
    meaning: str


def option(kind: Kind[T], default: str, meaning: str) -> T:
    """Declare an option: the dataclass field takes its default, and its row is kept for checks and documents."""
    return field(default=kind.read(default), metadata={"option": Option(kind, default, meaning)})


@dataclass(frozen=True, slots=True)
class Log:
    """What the daemon writes to standard error, which systemd keeps in the journal."""

    level: str = option(
        choice("level", "debug", "info", "warning", "error"),
        "info",
        "The least severe lines that are written.",
    )


@dataclass(frozen=True, slots=True)
class Web:
    """The server that Prometheus scrapes."""

    listen: Address = option(
        ADDRESS,
        "127.0.0.1:9846",
        "Where to listen: 0.0.0.0 is every IPv4 address, an IPv6 address stands in brackets and the whole in quotes, "
        "and port 0 takes any free port.",
    )
    max_connections: int = option(
        between(WHOLE, "1", "10000"),
        "256",
        "Connections held at once, beyond which the one that has been idle or slow for longest is cut.",
    )
    timeout: float = option(
        between(DURATION, "100ms", "5m"),
        "10s",
        "How long a client may take to send its request or to read its answer.",
    )


@dataclass(frozen=True, slots=True)
class Poll:
    """Reading the driver."""

    interval: float = option(
        between(DURATION, "100ms", "1h"),
        "1s",
        "Time from one poll of the GPUs to the next, which is also how old a scraped value can be.",
    )
    slow_interval: float = option(
        between(DURATION, "1s", "1h"),
        "15s",
        "Time between reads of what changes slowly or costs the driver much, such as error counters, links and limits; "
        "docs/metrics.md names the tier of each metric.",
    )
    memory_interval: float = option(
        between(DURATION, "20ms", "1h"),
        "100ms",
        "Time between looks at memory alone, which catch its peaks between polls; as long as poll.interval or longer "
        "leaves them out.",
    )


@dataclass(frozen=True, slots=True)
class Gpus:
    """What is asked of the GPUs."""

    gpm: bool = option(
        BOOLEAN,
        "true",
        "Read how busy SMs, pipes and memory are (GPM, on Hopper and newer); false leaves the hardware's counters to "
        "another program that profiles, such as DCGM, where the two disturb each other.",
    )
    pcie_throughput: bool = option(
        BOOLEAN,
        "false",
        "Whether to measure PCIe throughput on GPUs without GPM whose byte counters are too narrow to be of use; each "
        "GPU then blocks in the driver for 40 ms every poll.slow_interval.",
    )
    let_sleep: bool = option(
        BOOLEAN,
        "false",
        "Whether to leave GPUs alone that the kernel has suspended (runtime D3) or could suspend, at the price of gaps "
        "in their readings.",
    )

    @property
    def opted_in(self) -> frozenset[str]:
        """The options that are on, by the names that rows of the tables ask for."""
        return frozenset(f"gpus.{item.name}" for item in fields(self) if getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class KernelLog:
    """The kernel log, where the driver writes XIDs that it tells nobody else of."""

    path: Path = option(
        PATH,
        "/dev/kmsg",
        "The kernel log's device, which docs/operations.md says how to let the service read.",
    )


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that hold device memory, one by one."""

    series: bool = option(
        BOOLEAN,
        "false",
        "Whether each process gets series of its own, beside those of its owners; each new process makes new ones.",
    )
    max_series: int = option(
        between(WHOLE, "1", "100000"),
        "256",
        "Processes that get series at once, those with the most device memory first.",
    )


@dataclass(frozen=True, slots=True)
class Owners:
    """Who holds device memory: users, containers, pods, Slurm jobs, systemd units and runs."""

    max: int = option(
        between(WHOLE, "1", "10000"),
        "32",
        "Owners of a kind exposed on each GPU, those with the most device memory first; the rest is the owner `other`.",
    )
    docker: OptionalPath = option(
        OPTIONAL_PATH, "/run/docker.sock", "Docker's socket, asked for the names of containers if it is there."
    )
    podman: OptionalPath = option(OPTIONAL_PATH, "/run/podman/podman.sock", "Podman's socket, likewise.")
    kubernetes_logs: OptionalPath = option(
        OPTIONAL_PATH,
        "/var/log",
        "Where Kubernetes keeps `pods` and `containers`, whose file names tell the names of both.",
    )
    slurm_job_map: OptionalPath = option(
        OPTIONAL_PATH,
        "none",
        "A directory of dcgm-exporter's kind, in which each GPU's file, named by its index, lists the GPU's jobs.",
    )
    slurm_gpustat: OptionalPath = option(
        OPTIONAL_PATH,
        "/run/gpustat",
        "A directory of jobstats' kind, in which each GPU's file, named by index or UUID, has the job and its user id.",
    )


_NONE = OptionalPath(None)
NO_OWNERS = Owners(docker=_NONE, podman=_NONE, kubernetes_logs=_NONE, slurm_job_map=_NONE, slurm_gpustat=_NONE)


@dataclass(frozen=True, slots=True)
class Runs:
    """The training runs that report to the daemon."""

    socket: Path = option(
        SOCKET_PATH,
        "/run/gpuwarden/run.sock",
        "The Unix socket that runs report to, of at most 107 bytes.",
    )
    socket_mode: int = option(
        MODE,
        "0666",
        "Who may report, as the socket's file mode; quote it, as other programs may read a bare 0666 as 438.",
    )
    socket_group: Group = option(
        GROUP,
        "none",
        'The group that the socket belongs to, whose members alone may report with the mode "0660"; the service has to '
        "be in it (docs/operations.md).",
    )
    max: int = option(
        between(WHOLE, "1", "2048"),
        "512",
        "Runs kept at once, beyond which a new one is turned away and counted.",
    )
    expiry: float = option(
        between(DURATION, "1s", "24h"),
        "2m",
        "How long a run's last report counts as current, and how long its counters stay after its end.",
    )
    stall_factor: int = option(
        between(WHOLE, "1", "1000"),
        "10",
        "How many times as long as the run's slow steps (95th percentile) a step may take before the run counts as "
        "stalled.",
    )
    stall_after: float = option(
        between(DURATION, "1s", "24h"),
        "1m",
        "How long a step may take in any case before the run counts as stalled.",
    )
    context_overhead: int = option(
        between(SIZE, "0", "64GiB"),
        "512MiB",
        "Device memory that a process holds beside its allocator's pool (CUDA context, cuBLAS, cuDNN), which headroom "
        "leaves out.",
    )


@dataclass(frozen=True, slots=True)
class Receipts:
    """The receipts of training runs: what each was, did and cost, a file a run."""

    path: OptionalPath = option(
        OPTIONAL_PATH,
        "/var/lib/gpuwarden/receipts",
        "The folder they lie in, `none` to keep them in memory alone; unless it is set, a daemon that is not root's "
        "has them in systemd's state directory or in gpuwarden/receipts below XDG_STATE_HOME (~/.local/state).",
    )
    max: int = option(
        between(WHOLE, "1", "100000"),
        "1000",
        "Receipts of ended runs kept in the folder, beyond which the oldest is removed.",
    )


@dataclass(frozen=True, slots=True)
class Control:
    """What an administrator may tell the running daemon."""

    socket: Path = option(
        CONTROL_PATH,
        "control.sock",
        "The Unix socket that gpuwarden pause and resume speak to, for root and the daemon's own user alone; a file "
        "name stands for one beside runs.socket.",
    )


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated GPUs, where the source is `simulated` or `auto` found no driver."""

    gpus: int = option(between(WHOLE, "1", "64"), "8", "How many there are.")
    seed: int = option(
        between(WHOLE, "0", "4294967295"),
        "1",
        "What their readings are drawn from: the same seed gives the same readings.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration; `Config()` holds the defaults."""

    source: Source = option(
        SOURCE,
        "nvml",
        "Where GPU readings come from: nvml is the driver, simulated needs none, capture:FILE replays recorded "
        "answers, and auto is the driver if there is one, else simulated with a warning.",
    )
    compat: str = option(
        choice("set of names", "none", "dcgm"),
        "none",
        "Names that the page bears beside its own: dcgm is those of dcgm-exporter, for dashboards and alerts made for "
        "it (docs/migration.md).",
    )
    log: Log = Log()
    web: Web = Web()
    poll: Poll = Poll()
    gpus: Gpus = Gpus()
    kernel_log: KernelLog = KernelLog()
    processes: Processes = Processes()
    owners: Owners = Owners()
    runs: Runs = Runs()
    receipts: Receipts = Receipts()
    control: Control = Control()
    simulation: Simulation = Simulation()

    @property
    def control_socket(self) -> Path:
        """Where the control socket lies."""
        return self.runs.socket.parent / self.control.socket  # an absolute path stands for itself


SECTIONS: dict[str, Any] = {item.name: item.default for item in fields(Config) if "option" not in item.metadata}


def _declared(section: Any, prefix: str) -> Iterator[tuple[str, Option]]:
    for item in fields(section):
        if "option" in item.metadata:
            yield prefix + item.name, item.metadata["option"]
        else:
            yield from _declared(item.default, f"{item.name}.")


OPTIONS: dict[str, Option] = dict(_declared(Config, ""))


def load(
    path: Path | None, overrides: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Config:
    """Read the file at `path`, or take the defaults for None; an entry of `overrides`, by key, wins over the file.

    `flags` names where an override was given, such as `{"web.listen": "--listen"}`, for the message about a bad one.
    Raises ConfigError with everything that is wrong in the file and the overrides.
    """
    contents = config_file.Contents() if path is None else config_file.read(path, OPTIONS)
    given = [Entry(key, text, (flags or {}).get(key, key)) for key, text in (overrides or {}).items()]
    return _config([*contents.entries, *given], contents.problems)


def parse(text: str, name: str) -> Config:
    """Read `text` as the contents of a file called `name`; raises ConfigError."""
    contents = config_file.parse(text, name, OPTIONS)
    return _config(contents.entries, contents.problems)


def _config(entries: Sequence[Entry], problems: Sequence[Problem]) -> Config:
    values: dict[str, Any] = {}
    found = list(problems)
    for entry in entries:
        try:
            values[entry.key] = OPTIONS[entry.key].kind.read(entry.text)
        except ValueError as error:
            found.append(entry.problem(str(error)))
    if found:
        raise ConfigError(sorted(found, key=lambda problem: (problem.place is None, problem.place or ())))
    sections = {name: type(default)(**_within(name, values)) for name, default in SECTIONS.items()}
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})


def _within(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{section}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
