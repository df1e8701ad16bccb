"""Configuration schema: every option declared once, with its kind, its default and its meaning.

`loader` reads a file by these declarations, `schema_docs` documents them. Durations are float seconds and sizes int
bytes. Values do not change after they are read.
"""

# ruff: noqa: RUF009  option() makes the dataclass field that the rule asks for

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from gpuwarden.config import thresholds
from gpuwarden.config.secrets import Secret
from gpuwarden.config.value_types import (
    ADDRESS,
    BOOLEAN,
    CONTROL_PATH,
    DOCS,
    DURATION,
    LABEL,
    MODE,
    NUMBER,
    PATH,
    SECRET,
    SECRET_URL,
    SERVER_URL,
    SERVICE_URL,
    SHARE,
    SIZE,
    SOCKET_PATH,
    SOURCE,
    TEXT,
    WHOLE,
    Address,
    SourceChoice,
    ValueType,
    bounded,
    choice,
    list_of,
    optional,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of one option; `default` is written as in the file."""

    kind: ValueType[Any]
    default: str
    meaning: str


def option(kind: ValueType[T], default: str, meaning: str) -> T:
    """Declare an option: a dataclass field with its default, which keeps the declaration as metadata."""
    return field(default=kind.read(default), metadata={"option": Option(kind, default, meaning)})


_OPTIONAL_PATH = optional(PATH, None)
_OPTIONAL_TEXT = optional(TEXT, None)
_OPTIONAL_SECRET = optional(SECRET, Secret())


# A row an option: kind and default, then the meaning.
# fmt: off

@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log lines of the daemon on standard error, which systemd keeps in the journal."""

    level: str = option(choice("level", "debug", "info", "warning", "error"), "info",
        "The least severe lines that are written.")


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The server that Prometheus scrapes."""

    listen: Address = option(ADDRESS, "127.0.0.1:9846",
        "Where to listen: 0.0.0.0 is every IPv4 address, an IPv6 address stands in brackets and the whole in quotes, "
        "and port 0 takes any free port.")
    max_connections: int = option(bounded(WHOLE, "1", "10000"), "256",
        "Connections held at once, beyond which the one that has been idle or slow for longest is cut.")
    timeout: float = option(bounded(DURATION, "100ms", "5m"), "10s",
        "How long a client may take to send its request or to read its answer.")


@dataclass(frozen=True, slots=True)
class PollConfig:
    """Reading the driver."""

    interval: float = option(bounded(DURATION, "100ms", "1h"), "1s",
        "Time from one poll of the GPUs to the next, which is also how old a scraped value can be.")
    slow_interval: float = option(bounded(DURATION, "1s", "1h"), "15s",
        "Time between reads of what changes slowly or costs the driver much, such as error counters, links and limits; "
        "docs/reference/metrics.md names the tier of each metric.")
    memory_interval: float = option(bounded(DURATION, "20ms", "1h"), "100ms",
        "Time between looks at memory alone, which catch its peaks between polls; as long as poll.interval or longer "
        "leaves them out.")


@dataclass(frozen=True, slots=True)
class GpusConfig:
    """Optional readings of the GPUs."""

    gpm: bool = option(BOOLEAN, "true",
        "Read how busy SMs, pipes and memory are (GPM, on Hopper and newer); false leaves the hardware's counters to "
        "another program that profiles, such as DCGM, where the two disturb each other.")
    pcie_throughput: bool = option(BOOLEAN, "false",
        "Whether to measure PCIe throughput on GPUs without GPM whose byte counters are too narrow to be of use; each "
        "GPU then blocks in the driver for 40 ms every poll.slow_interval.")
    let_sleep: bool = option(BOOLEAN, "false",
        "Whether to skip GPUs that the kernel has suspended (runtime D3), and to release the driver while no GPU is in "
        "use so that they can be, at the price of gaps in readings.")

    @property
    def opted_in(self) -> frozenset[str]:
        """The options that are on, by the names that rows of the tables ask for."""
        return frozenset(f"gpus.{item.name}" for item in fields(self) if getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class KernelLogConfig:
    """The kernel log, where the driver writes XIDs that it tells nobody else of."""

    path: Path = option(PATH, "/dev/kmsg",
        "The kernel log's device, which docs/start/install.md says how to let the service read.")


@dataclass(frozen=True, slots=True)
class ProcessesConfig:
    """The processes that hold device memory, one by one."""

    series: bool = option(BOOLEAN, "false",
        "Whether each process has series of its own, in addition to those of its owners; a new process adds new ones.")
    max_series: int = option(bounded(WHOLE, "1", "100000"), "256",
        "Processes that get series at once, those with the most device memory first.")


@dataclass(frozen=True, slots=True)
class OwnersConfig:
    """Owners of device memory: users, containers, pods, Slurm jobs, systemd units and runs."""

    max: int = option(bounded(WHOLE, "1", "10000"), "32",
        "Owners of a kind exposed on each GPU, those with the most device memory first; the rest is the owner `other`.")
    docker: Path | None = option(_OPTIONAL_PATH, "/run/docker.sock",
        "Docker's socket, asked for the names of containers if it is there.")
    podman: Path | None = option(_OPTIONAL_PATH, "/run/podman/podman.sock", "Podman's socket, likewise.")
    kubernetes_logs: Path | None = option(_OPTIONAL_PATH, "/var/log",
        "Where Kubernetes keeps `pods` and `containers`, whose file names hold the names of both.")
    slurm_job_map: Path | None = option(_OPTIONAL_PATH, "none",
        "A directory of dcgm-exporter's kind, in which each GPU's file, named by its index, lists the GPU's jobs.")
    slurm_gpustat: Path | None = option(_OPTIONAL_PATH, "/run/gpustat",
        "A directory of jobstats' kind, in which each GPU's file, named by index or UUID, has the job and its user id.")


NO_OWNERS = OwnersConfig(docker=None, podman=None, kubernetes_logs=None, slurm_job_map=None, slurm_gpustat=None)


@dataclass(frozen=True, slots=True)
class RunsConfig:
    """The training runs that report to the daemon."""

    socket: Path = option(SOCKET_PATH, "/run/gpuwarden/run.sock",
        "The Unix socket that runs report to, of at most 107 bytes.")
    socket_mode: int = option(MODE, "0666",
        "Who may report, as the socket's file mode; quote it, as other programs may read a bare 0666 as 438.")
    socket_group: str | None = option(_OPTIONAL_TEXT, "none",
        'The group that the socket belongs to, whose members alone may report with the mode "0660"; the service has to '
        "be in it (docs/start/install.md).")
    max: int = option(bounded(WHOLE, "1", "2048"), "512",
        "Runs kept at once, beyond which a new one is turned away and counted.")
    expiry: float = option(bounded(DURATION, "1s", "24h"), "2m",
        "How long a run's last report counts as current, and how long its counters stay after its end.")
    stall_factor: int = option(bounded(WHOLE, "1", "1000"), "10",
        "How many times as long as the run's slow steps (95th percentile) a step may take before the run counts as "
        "stalled.")
    stall_after: float = option(bounded(DURATION, "1s", "24h"), "1m",
        "How long a step may take in any case before the run counts as stalled.")
    context_overhead: int = option(bounded(SIZE, "0", "64GiB"), "512MiB",
        "Device memory that a process holds beside its allocator's pool (CUDA context, cuBLAS, cuDNN), which headroom "
        "leaves out.")


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """Pressure of a GPU, on which runs get advice (docs/understand/pressure.md)."""

    memory_warning: float = option(bounded(SHARE, "1%", "90%"), f"{thresholds.LITTLE_MEMORY:.0%}",
        "Of what a run uses and can still allocate on a GPU, the part it can still allocate at which pressure begins.")
    memory_critical: float = option(bounded(SHARE, "0%", "80%"), f"{thresholds.NEAR_OUT_OF_MEMORY:.0%}",
        "The same, where pressure is critical; less than pressure.memory_warning.")
    oom_warning: float = option(bounded(DURATION, "1s", "24h"), f"{thresholds.OUT_OF_MEMORY_AHEAD_SECONDS / 60:.0f}m",
        "Time until a run that grows is out of memory, at which pressure begins.")
    oom_critical: float = option(bounded(DURATION, "0", "23h"), f"{thresholds.OUT_OF_MEMORY_SOON_SECONDS / 60:.0f}m",
        "The same, where pressure is critical; less than pressure.oom_warning.")
    thermal_warning: float = option(bounded(NUMBER, "1", "50"), f"{thresholds.NEAR_SLOWDOWN:.0f}",
        "Degrees Celsius left before a GPU slows itself down, at which pressure by heat begins.")
    thermal_critical: float = option(bounded(NUMBER, "0", "49"), f"{thresholds.SLOWDOWN:.0f}",
        "The same, where pressure is critical; less than pressure.thermal_warning.")
    hold: float = option(bounded(DURATION, "0", "1h"), "30s",
        "How long it has to be clearly better before a level falls.")
    neighbour_share: float = option(bounded(SHARE, "1%", "100%"), "10%",
        "Of what a run could still allocate on a GPU, the part that another process takes before the run is warned.")


@dataclass(frozen=True, slots=True)
class RecordsConfig:
    """Records of training runs: what each was, did and cost."""

    path: Path | None = option(_OPTIONAL_PATH, "/var/lib/gpuwarden/receipts",
        "Folder of the run database, `none` to keep records in memory only; unless it is set, a daemon that is not "
        "root's has it in systemd's state directory or in gpuwarden/receipts below XDG_STATE_HOME (~/.local/state).")
    max: int = option(bounded(WHOLE, "1", "100000"), "1000",
        "Records of ended runs in the database; over this limit the user with the most loses their oldest one.")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Commands of an administrator to the running daemon."""

    socket: Path = option(CONTROL_PATH, "control.sock",
        "The Unix socket that gpuwarden pause and resume speak to, for root and the daemon's own user alone; a file "
        "name stands for one in the folder of runs.socket.")


@dataclass(frozen=True, slots=True)
class AlertmanagerConfig:
    """Alertmanagers that the daemon sends alerts to, before Prometheus (docs/use/notifications.md)."""

    url: tuple[str, ...] = option(list_of(SERVER_URL, "list of servers' URLs"), "none",
        "Where they are; each of them gets every alert.")
    job: str = option(TEXT, "gpuwarden", "The label `job` that Prometheus gives this daemon: its scrape job.")
    instance: str = option(optional(TEXT, ""), "none",
        "The label `instance` that Prometheus gives it: the target, as Prometheus has it; none is web.listen, with "
        "the name of the machine for every address.")
    labels: tuple[tuple[str, str], ...] = option(list_of(LABEL, "list of labels"), "none",
        "Further labels of all alerts: Prometheus' external_labels.")
    resend: float = option(bounded(DURATION, "1s", "10m"), "30s",
        "Time after which an alert that still fires is told again; four times as long after the last time it counts as "
        "over.")
    timeout: float = option(bounded(DURATION, "100ms", "1m"), "10s",
        "How long an Alertmanager may take to answer, before it is tried again.")
    user: str = option(optional(TEXT, ""), "none",
        "Who the daemon is, for a server that asks for a user and a password.")
    password: Secret = option(_OPTIONAL_SECRET, "none", "The user's password.")
    bearer_token: Secret = option(_OPTIONAL_SECRET, "none", "A token to show instead.")
    ca_file: Path | None = option(_OPTIONAL_PATH, "none",
        "Certificates in PEM to trust in addition to the system's, for servers with one of your own.")
    cert_file: Path | None = option(_OPTIONAL_PATH, "none",
        "The daemon's own certificate in PEM, for a server that asks for one.")
    key_file: Path | None = option(_OPTIONAL_PATH, "none",
        "Its key, without a password; none is in the file of the certificate.")
    docs: str = option(DOCS, "docs",
        "Where the folder docs/ is served, for links in alerts: a URL, or its name.")
    grafana: str = option(optional(DOCS, ""), "http://localhost:3000",
        "Where Grafana is, for links in alerts; none for no such links.")


_SEVERITY = choice("severity", "critical", "warning", "info")
_SEVERITY_MEANING = "The least severe alerts that go there."


@dataclass(frozen=True, slots=True)
class NotifyConfig:
    """Notifications that the daemon itself sends, where no Prometheus does (docs/use/notifications.md)."""

    webhook: tuple[Secret, ...] = option(list_of(SECRET_URL, "list of web addresses"), "none",
        "Where to post alerts as JSON.")
    webhook_token: Secret = option(_OPTIONAL_SECRET, "none", "A bearer token that is sent along with them.")
    webhook_severity: str = option(_SEVERITY, "info", _SEVERITY_MEANING)
    apprise: tuple[Secret, ...] = option(list_of(SERVICE_URL, "list of services"), "none",
        "URLs of apprise (https://github.com/caronc/apprise) for mail, Slack and other services; needs the package "
        "apprise (docs/use/notifications.md).")
    apprise_severity: str = option(_SEVERITY, "warning", _SEVERITY_MEANING)
    mute: tuple[str, ...] = option(list_of(TEXT, "list of alerts"), "none",
        "Alerts (docs/reference/alerts.md) that are not sent, such as RunKilled where people end runs by Ctrl-C.")
    ca_file: Path | None = option(_OPTIONAL_PATH, "none",
        "Certificates in PEM to trust in addition to the system's, for servers with one of your own.")
    docs: str = option(DOCS, "docs",
        "Where the folder docs/ is served, for links in messages: a URL, or its name.")
    timeout: float = option(bounded(DURATION, "100ms", "1m"), "10s",
        "How long a server may take to answer.")
    group_wait: float = option(bounded(DURATION, "0", "10m"), "3s",
        "How long the first alert waits for others that come with it, to go in the same message.")
    max_per_hour: int = option(bounded(WHOLE, "1", "3600"), "20",
        "Messages to each target in the long run, and a quarter as many in a row; more alerts make longer messages, "
        "not more. Messages with a new critical alert have as many of their own.")
    repeat: float = option(bounded(DURATION, "1m", "720h"), "4h",
        "Interval for re-sending an alert that is still firing.")
    resolved: bool = option(BOOLEAN, "true", "Whether to tell that an alert is over.")
    resolve_after: float = option(bounded(DURATION, "0", "24h"), "5m",
        "How long an alert has to be gone until it counts as over: one that comes and goes is sent once.")

    @property
    def anyone(self) -> bool:
        """Presence of a target to notify."""
        return bool(self.webhook or self.apprise)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The simulated GPUs, where the source is `simulated` or `auto` found no driver."""

    gpus: int = option(bounded(WHOLE, "1", "64"), "8", "How many there are.")
    seed: int = option(bounded(WHOLE, "0", "4294967295"), "1",
        "What their readings are drawn from: the same seed gives the same readings.")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration; `Config()` holds the defaults."""

    source: SourceChoice = option(SOURCE, "nvml",
        "Where GPU readings come from: nvml is the driver, simulated needs none, capture:FILE replays recorded "
        "answers, and auto is the driver if there is one, else simulated with a warning.")
    compat: str = option(choice("set of names", "none", "dcgm"), "none",
        "Names that the page bears beside its own: dcgm is those of dcgm-exporter, for dashboards and alerts made for "
        "it (docs/use/dcgm-migration.md).")
    log: LogConfig = LogConfig()
    web: WebConfig = WebConfig()
    poll: PollConfig = PollConfig()
    gpus: GpusConfig = GpusConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    processes: ProcessesConfig = ProcessesConfig()
    owners: OwnersConfig = OwnersConfig()
    runs: RunsConfig = RunsConfig()
    pressure: PressureConfig = PressureConfig()
    receipts: RecordsConfig = RecordsConfig()
    control: ControlConfig = ControlConfig()
    alertmanager: AlertmanagerConfig = AlertmanagerConfig()
    notify: NotifyConfig = NotifyConfig()
    simulation: SimulationConfig = SimulationConfig()

    @property
    def alerting(self) -> bool:
        """Delivery of alerts by the daemon itself: there is an Alertmanager or a target to notify."""
        return bool(self.alertmanager.url) or self.notify.anyone

    @property
    def control_socket(self) -> Path:
        """Path of the control socket."""
        return self.runs.socket.parent / self.control.socket  # an absolute path stands for itself


# fmt: on
SECTIONS: dict[str, Any] = {item.name: item.default for item in fields(Config) if "option" not in item.metadata}


def _declared(section: Any, prefix: str) -> Iterator[tuple[str, Option]]:
    for item in fields(section):
        if "option" in item.metadata:
            yield prefix + item.name, item.metadata["option"]
        else:
            yield from _declared(item.default, f"{item.name}.")


OPTIONS: dict[str, Option] = dict(_declared(Config, ""))
LISTS = frozenset(key for key, row in OPTIONS.items() if row.kind.many)
