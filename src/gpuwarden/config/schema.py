"""Configuration schema: every option declared once, with its type, default and meaning.

`loader` reads a file by these declarations, and `schema_docs` documents them. Durations are float seconds, sizes int
bytes. Values are frozen.
"""

# ruff: noqa: RUF009  option() returns the dataclass field that the rule requires

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from gpuwarden.config import thresholds
from gpuwarden.config.secrets import Secret
from gpuwarden.config.value_types import (
    ADDRESS,
    BOOLEAN,
    DEFAULT_PORT,
    DURATION,
    HOST_PATTERN,
    LABEL,
    MODE,
    NUMBER,
    PAGES_URL,
    PATH,
    SECRET,
    SECRET_URL,
    SERVER_URL,
    SERVICE_URL,
    SHARE,
    SIZE,
    SOCKET_PATH,
    SOCKET_PATH_OR_NAME,
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
from gpuwarden.config.web_config import uses_tls
from gpuwarden.metrics.model import Profile
from gpuwarden.severity import SEVERITY_RANK

T = TypeVar("T")

_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 - to recognize them


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of one option; `default` is in the notation of the file."""

    kind: ValueType[Any]
    default: str
    meaning: str


def option(kind: ValueType[T], default: str, meaning: str) -> T:
    """Declare an option: a dataclass field with the declaration as metadata."""
    return field(default=kind.read(default), metadata={"option": Option(kind, default, meaning)})


_OPTIONAL_PATH = optional(PATH, None)
_OPTIONAL_SIZE = optional(SIZE, None)
_OPTIONAL_COUNT = optional(WHOLE, None)
_OPTIONAL_TEXT = optional(TEXT, None)
_OPTIONAL_SECRET = optional(SECRET, Secret())


# One row per option: type and default, then the meaning.
# fmt: off

@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log of the daemon on standard error; as a service, in the journal."""

    level: str = option(choice("log level", "debug", "info", "warning", "error"), "info",
        "Minimum severity of log lines; set debug to find out why something is missing.")


@dataclass(frozen=True, slots=True)
class WebConfig:
    """HTTP server for Prometheus, the status page and the API."""

    listen: Address = option(ADDRESS, f"127.0.0.1:{DEFAULT_PORT}",
        "Address of metrics, pages and API; 0.0.0.0 is every IPv4 address, port 0 any free port. Quote an IPv6 "
        'address: "[::1]:9846".')
    max_connections: int = option(bounded(WHOLE, "1", "10000"), "256",
        "Maximum open connections; above it, the one that has been idle or slow for longest is closed.")
    timeout: float = option(bounded(DURATION, "100ms", "5m"), "10s",
        "Time that a client has to send its request or to read the response.")
    allowed_hosts: tuple[str, ...] = option(list_of(HOST_PATTERN), "none",
        "Additional host names that requests may address (docs/understand/shared-machines.md).")
    external_url: str = option(optional(PAGES_URL, ""), "none",
        "URL at which people reach the pages, for links in alerts; its host name is accepted in requests. none uses "
        "web.listen.")
    config_file: Path | None = option(_OPTIONAL_PATH, "none",
        "File with TLS, certificates of clients and logins for web.listen, in the format of Prometheus' "
        "exporters (docs/use/tls.md); read again when it changes. web.socket has none of them.")
    socket: Path = option(SOCKET_PATH_OR_NAME, "api.sock",
        "Unix socket that serves the same and identifies the client's user, for `gpuwarden runs`.")
    show_error_text: str = option(choice("error texts", "own", "true", "false"), "own",
        "Whether web.listen serves error messages, which can contain passwords and paths. own: only those of the "
        "daemon's own user, unless that is root; true: of all users; false: never.")

    @property
    def reachable(self) -> Address:
        """Address for other machines: the host name in place of a wildcard address."""
        return self.listen._replace(host=socket.gethostname()) if self.listen.host in _WILDCARDS else self.listen

    def read_pages_url(self) -> str:
        """Return the URL of the pages, without a slash at the end; may read web.config_file."""
        return self.external_url or f"{self.read_scheme()}://{self.reachable}"

    def read_scheme(self) -> str:
        """Read web.config_file, and return the scheme of the URLs of web.listen."""
        return "https" if uses_tls(self.config_file) else "http"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics for Prometheus. The pages, the API and the daemon's own alerts do not depend on it."""

    profile: str = option(choice("profile", *get_args(Profile)), "standard",
        "Metrics of /metrics (docs/reference/metrics.md). minimal: at most 200 series with 8 GPUs and a few runs, for "
        "fleets; full: those of processes too, as with processes.series. Names by compat are added to each profile.")


@dataclass(frozen=True, slots=True)
class PollConfig:
    """Polling of the driver."""

    interval: float = option(bounded(DURATION, "100ms", "1h"), "1s",
        "Time between polls of the GPUs, and so the maximum age of a scraped value; raise it if the driver is slow.")
    slow_interval: float = option(bounded(DURATION, "1s", "1h"), "15s",
        "Time between reads of values that change slowly or are expensive, such as error counters, links and limits.")
    memory_interval: float = option(bounded(DURATION, "20ms", "1h"), "100ms",
        "Time between samples of memory use alone, which catch peaks between polls; a value of poll.interval or more "
        "turns them off.")


@dataclass(frozen=True, slots=True)
class GpusConfig:
    """Optional GPU readings."""

    gpm: bool = option(BOOLEAN, "true",
        "Read the utilization of SMs, pipes and memory (GPM, Hopper and newer); set false if another profiler, such "
        "as DCGM, uses the same hardware counters.")
    pcie_throughput: bool = option(BOOLEAN, "false",
        "Measure PCIe throughput on GPUs without GPM that do not count bytes in more than 32 bits; this blocks the "
        "driver for 40 ms per GPU every poll.slow_interval.")
    let_sleep: bool = option(BOOLEAN, "false",
        "Skip GPUs that the kernel has suspended (runtime D3), and release the driver while no GPU is in use so that "
        "it can suspend them; readings then have gaps.")

    @property
    def opted_in(self) -> frozenset[str]:
        """Names of the options that are on, as `opt_in` of metrics has them."""
        return frozenset(f"gpus.{item.name}" for item in fields(self) if getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class KernelLogConfig:
    """Kernel log, in which the driver writes XIDs that NVML does not report."""

    path: Path = option(PATH, "/dev/kmsg",
        "Device of the kernel log; docs/start/install.md explains how to let the service read it.")


@dataclass(frozen=True, slots=True)
class ProcessesConfig:
    """Metrics of each process that has device memory."""

    series: bool = option(BOOLEAN, "false",
        "Export metrics for each process, not only for its owners; each new process adds series. Without effect with "
        "metrics.profile minimal.")
    max_series: int = option(bounded(WHOLE, "1", "100000"), "256",
        "Maximum number of processes with metrics; those with the most device memory come first.")


@dataclass(frozen=True, slots=True)
class OwnersConfig:
    """Owners of device memory: users, containers, pods, Slurm jobs, systemd units and runs."""

    max: int = option(bounded(WHOLE, "1", "10000"), "32",
        "Maximum number of owners of each kind per GPU, those with the most device memory first; the rest are summed "
        "as the owner `other`.")
    docker: Path | None = option(_OPTIONAL_PATH, "/run/docker.sock",
        "Docker socket, for container names; not required.")
    podman: Path | None = option(_OPTIONAL_PATH, "/run/podman/podman.sock",
        "Podman socket, for container names; not required.")
    kubernetes_logs: Path | None = option(_OPTIONAL_PATH, "/var/log",
        "Folder with the Kubernetes folders `pods` and `containers`, whose file names contain pod and container "
        "names.")
    slurm_job_map: Path | None = option(_OPTIONAL_PATH, "none",
        "Folder with one file per GPU, named by index, that lists its Slurm jobs, as for dcgm-exporter.")
    slurm_gpustat: Path | None = option(_OPTIONAL_PATH, "/run/gpustat",
        "Folder with one file per GPU, named by index or UUID, with the Slurm job and user id, as for jobstats.")


NO_OWNERS = OwnersConfig(docker=None, podman=None, kubernetes_logs=None, slurm_job_map=None, slurm_gpustat=None)


@dataclass(frozen=True, slots=True)
class RunsConfig:
    """Training runs that report to the daemon."""

    socket: Path = option(SOCKET_PATH, "/run/gpuwarden/run.sock",
        "Unix socket that runs report to, at most 107 bytes long.")
    socket_mode: int = option(MODE, "0666",
        "File mode of the socket, which decides who can report; quote it, because YAML 1.1 reads a bare 0666 as 438.")
    socket_group: str | None = option(_OPTIONAL_TEXT, "none",
        'Group of the socket; with the mode "0660" only its members can report, and the service must be a member too '
        "(docs/start/install.md).")
    max: int = option(bounded(WHOLE, "1", "2048"), "512",
        "Maximum number of runs at once (docs/understand/shared-machines.md).")
    max_per_user: int = option(bounded(WHOLE, "1", "2048"), "128",
        "Maximum number of runs of one user at once, those of the user's subordinate uids included.")
    new_per_minute: int = option(bounded(WHOLE, "1", "60000"), "60",
        "Maximum number of new runs of one user per minute, also the largest burst.")
    expiry: float = option(bounded(DURATION, "1s", "24h"), "2m",
        "Time after which a run's last report is outdated, and for which its counters remain after its end.")
    stall_factor: int = option(bounded(WHOLE, "1", "1000"), "10",
        "A run is stalled when a step takes this many times its 95th percentile step time; raise it for runs with "
        "uneven steps.")
    stall_after: float = option(bounded(DURATION, "1s", "24h"), "1m",
        "Minimum duration of a step before the run counts as stalled.")
    trust_reports: bool = option(BOOLEAN, "false",
        "Trust the GPUs that a run reports even where the driver does not list its process, as in a container without "
        "the host's pids; any user who can report can then raise alerts about any GPU.")
    context_overhead: int = option(bounded(SIZE, "0", "64GiB"), "512MiB",
        "Device memory that a process uses in addition to its allocator's pool (CUDA context, cuBLAS, cuDNN); "
        "subtracted from headroom.")


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """Pressure levels of GPUs; runs can react to them (docs/understand/pressure.md)."""

    memory_warning: float = option(bounded(SHARE, "1%", "90%"), f"{thresholds.LITTLE_MEMORY:.0%}",
        "Headroom at which memory pressure is a warning, as a share of a run's used memory plus headroom.")
    memory_critical: float = option(bounded(SHARE, "0%", "80%"), f"{thresholds.NEAR_OUT_OF_MEMORY:.0%}",
        "Headroom at which memory pressure is critical; must be below pressure.memory_warning.")
    oom_warning: float = option(bounded(DURATION, "1s", "24h"), f"{thresholds.OUT_OF_MEMORY_AHEAD_SECONDS / 60:.0f}m",
        "Forecast time to out-of-memory at which memory pressure is a warning.")
    oom_critical: float = option(bounded(DURATION, "0", "23h"), f"{thresholds.OUT_OF_MEMORY_SOON_SECONDS / 60:.0f}m",
        "Forecast time to out-of-memory at which memory pressure is critical; must be below pressure.oom_warning.")
    thermal_warning: float = option(bounded(NUMBER, "1", "50"), f"{thresholds.NEAR_SLOWDOWN:.0f}",
        "Margin to the throttle temperature, in degrees Celsius, at which thermal pressure is a warning.")
    thermal_critical: float = option(bounded(NUMBER, "0", "49"), f"{thresholds.SLOWDOWN:.0f}",
        "Margin to the throttle temperature, in degrees Celsius, at which thermal pressure is critical; must be "
        "below pressure.thermal_warning.")
    hold: float = option(bounded(DURATION, "0", "1h"), "30s",
        "Time for which a value must stay clearly better before its level drops; raise it if levels flap. A level by "
        "the OOM forecast drops as soon as the growth has ended.")
    co_tenant_share: float = option(bounded(SHARE, "1%", "100%"), "10%",
        "Share of a run's headroom that a co-tenant (another process) must take before the run is warned.")


@dataclass(frozen=True, slots=True)
class RecordsConfig:
    """Run records: history of finished training runs."""

    path: Path | None = option(_OPTIONAL_PATH, "/var/lib/gpuwarden/records",
        "Folder of the run database; `none` keeps records in memory only. If it is not set and the daemon does not "
        "run as root, it is in systemd's state directory, or below ~/.local/state.")
    max: int = option(bounded(WHOLE, "1", "100000"), "1000",
        "Maximum number of records; above it, the user with the most records loses their oldest one.")


@dataclass(frozen=True, slots=True)
class IncidentsConfig:
    """Flight recorder: the ten minutes before something went wrong, and what happened."""

    enabled: bool = option(BOOLEAN, "true",
        "Record an incident when a run dies, runs out of memory or stalls, and when a GPU fails or overheats.")
    max: int = option(bounded(WHOLE, "1", "1000"), "100",
        "Maximum number of incidents in the run database, of 64 MiB in total; above it, the user with the most "
        "incidents loses their oldest one.")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Administration of the running daemon."""

    socket: Path = option(SOCKET_PATH_OR_NAME, "control.sock",
        "Unix socket of gpuwarden check, pause, resume and incidents record, for root and the daemon's user only.")


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """Fitness of the node for jobs, as `gpuwarden check` answers (docs/use/check.md)."""

    off: tuple[str, ...] = option(list_of(TEXT), "none",
        "Names of checks to leave out (docs/reference/checks.md).")
    unfit: tuple[str, ...] = option(list_of(TEXT), "none",
        "Names of checks whose warnings make the node unfit.")
    gpus: tuple[str, ...] = option(list_of(TEXT), "none",
        "GPUs that the node must have: their UUIDs, or their number. none accepts those that it starts with.")
    mig_instances: int | None = option(_OPTIONAL_COUNT, "none",
        "Number of MIG instances that the node must have; none accepts any.")
    paths: tuple[Path, ...] = option(list_of(PATH), "/",
        "Paths on file systems that jobs write to.")
    disk_free: int = option(bounded(SIZE, "0", "64TiB"), "1GiB",
        "Minimum free space of these file systems.")


@dataclass(frozen=True, slots=True)
class AlertmanagerConfig:
    """Alertmanagers that the daemon sends alerts to, without Prometheus (docs/use/notifications.md)."""

    url: tuple[str, ...] = option(list_of(SERVER_URL), "none",
        "Base URLs of the Alertmanagers; each of them receives every alert.")
    job: str = option(TEXT, "gpuwarden",
        "Label `job` of the alerts: the name of this daemon's scrape job in Prometheus.")
    instance: str = option(optional(TEXT, ""), "none",
        "Label `instance` of the alerts: the target as in Prometheus; none uses web.listen.")
    labels: tuple[tuple[str, str], ...] = option(list_of(LABEL), "none",
        "More labels for all alerts: the same as external_labels in Prometheus.")
    resend: float = option(bounded(DURATION, "1s", "10m"), "30s",
        "Interval for re-sending a firing alert; Alertmanager resolves it after four intervals without a re-send.")
    timeout: float = option(bounded(DURATION, "100ms", "1m"), "10s",
        "Time that an Alertmanager has to respond before the request is retried.")
    user: str = option(optional(TEXT, ""), "none", "User name for basic authentication.")
    password: Secret = option(_OPTIONAL_SECRET, "none", "Password of the user.")
    bearer_token: Secret = option(_OPTIONAL_SECRET, "none", "Bearer token, in place of user and password.")
    ca_file: Path | None = option(_OPTIONAL_PATH, "none",
        "PEM file of CA certificates to trust in addition to the system's, for a private CA.")
    cert_file: Path | None = option(_OPTIONAL_PATH, "none",
        "PEM file of the client certificate, for a server that requires one.")
    key_file: Path | None = option(_OPTIONAL_PATH, "none",
        "PEM file of the client certificate's key, without a passphrase; not needed if cert_file contains the key.")
    runbook_url: str = option(optional(PAGES_URL, ""), "none",
        "URL below which runbooks have the names of the alerts, for links in alerts; none links to the daemon's own.")
    dashboard_url: str = option(optional(PAGES_URL, ""), "none",
        "URL of Grafana, for links in alerts; none links to the daemon's own pages.")


_SEVERITY = choice("severity", *SEVERITY_RANK)


@dataclass(frozen=True, slots=True)
class NotifyConfig:
    """Notifications from the daemon itself, for hosts without Prometheus (docs/use/notifications.md)."""

    webhook: tuple[Secret, ...] = option(list_of(SECRET_URL), "none",
        "URLs that receive alerts as JSON in a POST request.")
    webhook_token: Secret = option(_OPTIONAL_SECRET, "none", "Bearer token sent to the webhooks.")
    webhook_severity: str = option(_SEVERITY, "info", "Minimum severity of the alerts sent to the webhooks.")
    apprise: tuple[Secret, ...] = option(list_of(SERVICE_URL), "none",
        "URLs of apprise (https://github.com/caronc/apprise) for mail, Slack and other services; needs the package "
        "apprise (docs/use/notifications.md).")
    apprise_severity: str = option(_SEVERITY, "warning", "Minimum severity of the alerts sent to the apprise URLs.")
    mute: tuple[str, ...] = option(list_of(TEXT), "none",
        "Names of alerts that are not sent (docs/reference/alerts.md), for example RunKilled if users stop runs with "
        "Ctrl-C.")
    ca_file: Path | None = option(_OPTIONAL_PATH, "none",
        "PEM file of CA certificates to trust in addition to the system's, for a private CA.")
    timeout: float = option(bounded(DURATION, "100ms", "1m"), "10s",
        "Time that a server has to respond before the message is retried.")
    group_wait: float = option(bounded(DURATION, "0", "10m"), "3s",
        "Time to wait for more alerts after the first, to send them in one message.")
    max_per_hour: int = option(bounded(WHOLE, "1", "3600"), "20",
        "Maximum messages per hour to each target; more alerts wait for the next message. New critical alerts have a "
        "second limit of the same size.")
    repeat: float = option(bounded(DURATION, "1m", "720h"), "4h",
        "Interval for re-sending an alert that is still firing.")
    resolved: bool = option(BOOLEAN, "true", "Send a message when an alert is resolved.")
    resolve_after: float = option(bounded(DURATION, "0", "24h"), "5m",
        "Time for which an alert must stop firing before it is resolved, so that a flapping alert is sent once.")

    @property
    def anyone(self) -> bool:
        """Presence of a target to notify."""
        return bool(self.webhook or self.apprise)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Simulated GPUs, with the source `simulated`, or `auto` without a driver."""

    gpus: int = option(bounded(WHOLE, "1", "8"), "8", "Number of simulated GPUs.")
    stand_in_memory: int | None = option(_OPTIONAL_SIZE, "none",
        "Memory of GPU 7, on which no simulated run is: a real training on the CPU can report to it.")


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration; `Config()` has the defaults."""

    source: SourceChoice = option(SOURCE, "nvml",
        "Source of GPU readings: nvml is the driver, simulated needs no GPU, capture:FILE replays a recording, and "
        "auto is nvml if there is a driver, else simulated with a warning.")
    compat: str = option(choice("metric names", "none", "dcgm"), "none",
        "Additional metric names: dcgm adds those of dcgm-exporter, for existing dashboards and alerts "
        "(docs/use/dcgm-migration.md).")
    log: LogConfig = LogConfig()
    web: WebConfig = WebConfig()
    metrics: MetricsConfig = MetricsConfig()
    poll: PollConfig = PollConfig()
    gpus: GpusConfig = GpusConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    processes: ProcessesConfig = ProcessesConfig()
    owners: OwnersConfig = OwnersConfig()
    runs: RunsConfig = RunsConfig()
    pressure: PressureConfig = PressureConfig()
    records: RecordsConfig = RecordsConfig()
    incidents: IncidentsConfig = IncidentsConfig()
    control: ControlConfig = ControlConfig()
    check: CheckConfig = CheckConfig()
    alertmanager: AlertmanagerConfig = AlertmanagerConfig()
    notify: NotifyConfig = NotifyConfig()
    simulation: SimulationConfig = SimulationConfig()

    @property
    def process_series(self) -> bool:
        """Export of metrics for each process."""
        return self.processes.series or self.metrics.profile == "full"

    @property
    def alerting(self) -> bool:
        """Delivery of alerts by the daemon itself: to an Alertmanager or a target of notify."""
        return bool(self.alertmanager.url) or self.notify.anyone

    @property
    def web_socket(self) -> Path:
        """Path of the Unix socket of the API."""
        return self.runs.socket.parent / self.web.socket

    @property
    def api(self) -> Address | Path:
        """Place where commands reach the API: its Unix socket if web.listen may need TLS or a login, or any port."""
        return self.web_socket if self.web.config_file or not self.web.listen.port else self.web.listen

    @property
    def control_socket(self) -> Path:
        """Path of the control socket."""
        return self.runs.socket.parent / self.control.socket  # an absolute path replaces the folder


# fmt: on
SECTIONS: dict[str, Any] = {item.name: item.default for item in fields(Config) if "option" not in item.metadata}


def _declared(section: Any, prefix: str) -> Iterator[tuple[str, Option]]:
    for item in fields(section):
        if "option" in item.metadata:
            yield prefix + item.name, item.metadata["option"]
        else:
            yield from _declared(item.default, f"{item.name}.")


OPTIONS: dict[str, Option] = dict(_declared(Config, ""))
# Options that a reload applies; the others need a restart.
_RELOADABLE_SECTIONS = {"log", "metrics", "processes", "pressure", "check", "alertmanager", "notify"}
_RELOADABLE_WEB = ("allowed_hosts", "external_url", "max_connections", "show_error_text", "timeout")
RELOADABLE = frozenset(
    {key for key in OPTIONS if key.partition(".")[0] in _RELOADABLE_SECTIONS}
    | {f"web.{name}" for name in _RELOADABLE_WEB}
)
LISTS = frozenset(key for key, row in OPTIONS.items() if row.kind.many)
