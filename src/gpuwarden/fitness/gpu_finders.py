"""Problems of GPUs that no health condition covers at a single poll."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpuwarden.config.thresholds import THROTTLED_SECONDS, XID_SECONDS
from gpuwarden.fitness.model import Find, FitnessProblem, Node
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.gpu.unlisted_memory import MAX_UNLISTED_BYTES, unlisted_memory
from gpuwarden.health.ecc_conditions import uncorrected_errors
from gpuwarden.health.link_conditions import pcie_shortfall
from gpuwarden.host import pid_namespace, procfs
from gpuwarden.metrics.model import Metric
from gpuwarden.owners.processes import MPS_COMM
from gpuwarden.xid.codes import times_by_severity

MAX_XIDS = 3  # of one code since boot
MAX_LOSSES = 2  # in LOSS_DAYS
LOSS_DAYS = 7
MIN_HELD_BYTES = 1 << 20
# Programs that serve several jobs and stay, as the kernel names them (15 bytes).
SERVICES = (MPS_COMM, "nvidia-persiste")
RELEASE_SECONDS = 5.0  # in which the driver frees the memory of a process that has ended


def _problem(gpu: Gpu, text: str) -> FitnessProblem:
    return FitnessProblem(f"GPU {gpu.identity.index}: {text}", gpu.identity.uuid)


def reading_is(row: Metric[Any], value: float, text: str) -> Find:
    """Return a finder of the GPUs that have this value of a reading."""
    return lambda node: (_problem(gpu, text) for gpu in node.gpus if gpu.value(row) == value)


def find_missing(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs that answered earlier or are configured, and that a driver that answers does not list."""
    if node.state.snapshot.fault is not None:
        return
    gpus = node.state.snapshot.gpus
    listed = {gpu.identity.uuid for gpu in gpus}
    for uuid, name in node.known.items():
        if uuid not in listed:
            yield FitnessProblem(f"{name} ({uuid}) is no longer listed by the driver", uuid)
    expected = [each for each in node.config.gpus if not each.isdecimal()]
    for uuid in expected:
        if uuid not in listed and uuid not in node.known:
            yield FitnessProblem(f"GPU {uuid} is expected and not there", uuid)
    count = next((int(each) for each in node.config.gpus if each.isdecimal()), len(expected) or None)
    if count is not None and len(gpus) != count:
        yield FitnessProblem(f"{len(gpus)} GPUs, expected {count}")


def find_old_xids(node: Node) -> Iterator[FitnessProblem]:
    """Find XIDs since boot that no longer raise an alert: critical ones, and warnings that repeat."""
    now = node.state.snapshot.time
    for gpu in node.state.snapshot.gpus:
        for code, seen in gpu.xids.items():
            severities = times_by_severity(code, seen)
            at = severities.get("critical")
            if at is not None and now - at >= XID_SECONDS:
                yield _problem(gpu, f"XID {code} {format_elapsed(now - at)} ago")
            elif "warning" in severities and seen.count >= MAX_XIDS:
                yield _problem(gpu, f"XID {code} {seen.count} times since boot")


def find_losses(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs that failed repeatedly in the last days."""
    since = node.state.snapshot.time - LOSS_DAYS * 86400
    for gpu in node.state.snapshot.gpus:
        count = sum(at >= since for at in node.facts.losses.get(gpu.identity.uuid, ()))
        if count >= MAX_LOSSES:
            yield _problem(gpu, f"failed {count} times in {LOSS_DAYS} days")


def find_uncorrected_errors(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs with uncorrected memory errors since the driver was loaded."""
    for gpu in node.gpus:
        if count := uncorrected_errors(gpu):
            yield _problem(gpu, f"{count:.0f} uncorrected memory errors since the last reset")


def find_nvlinks_down(node: Node) -> Iterator[FitnessProblem]:
    """Find NVLinks that are down and were up, or are up on most GPUs; not of GPUs with MIG, which use none."""
    states = {gpu.identity.uuid: nvlinks(gpu) for gpu in node.gpus}
    for gpu in node.gpus:
        if gpu.value(GpuReadings.mig_mode, "current"):
            continue
        uuid, down = gpu.identity.uuid, []
        for link, up in states[uuid].items():
            others = [links[link] for links in states.values() if link in links]
            if not up and ((uuid, link) in node.linked or 2 * sum(others) > len(others)):
                down.append(link)
        if down:
            yield _problem(gpu, f"NVLink {', '.join(down)} down")


def nvlinks(gpu: Gpu) -> dict[str, bool]:
    """Return whether each NVLink of a GPU is up."""
    return {labels[0]: bool(up) for labels, up in gpu.values(GpuReadings.nvlink_up).items()}


def find_slow_links(node: Node) -> Iterator[FitnessProblem]:
    """Find PCIe links without all lanes, or below their speed while the GPU is busy."""
    for gpu in node.gpus:
        if text := pcie_shortfall(gpu):
            yield _problem(gpu, text)


def find_recently_throttled(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs that were throttled in the last minutes, and are not now."""
    now = node.state.snapshot.time
    for gpu in node.gpus:
        last = node.throttled.get(gpu.identity.uuid, now)
        if 0 < now - last < THROTTLED_SECONDS:
            yield _problem(gpu, f"throttled {format_elapsed(now - last)} ago")


def find_capped_clocks(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs whose power limit or application clocks are below the default of the board."""
    for gpu in node.gpus:
        power, default = (gpu.value(GpuReadings.power_limit_watts, name) for name in ("requested", "default"))
        if power is not None and default is not None and power < default:
            yield _problem(gpu, f"power limit {power:.0f} W of {default:.0f} W")
        clock, usual = (
            gpu.value(GpuReadings.clock_application_hertz, "graphics", name) for name in ("current", "default")
        )
        if clock is not None and usual is not None and clock < usual:
            yield _problem(gpu, f"application clock {clock / 1e6:.0f} MHz of {usual / 1e6:.0f} MHz")


def find_held_memory(node: Node) -> Iterator[FitnessProblem]:
    """Find memory of the job's GPUs that is still held: before it by others, after it by any process, listed or not."""
    if node.question.stage == "none":
        return
    for gpu in node.gpus:
        yield from _find_unlisted_memory(node, gpu)
        for process in gpu.processes:
            owners = node.state.owners.by_pid.get(process.pid, {})
            is_own = node.question.stage == "prolog" and owners.get("slurm_job", "") == node.question.job != ""
            if not is_own and _holds(node, process):
                held = "memory" if process.memory is None else format_bytes(process.memory)
                user = f", user {owners['user']}" if "user" in owners else ""
                yield _problem(gpu, f"{held} still held by {_name(node, process)} (pid {process.pid}{user})")


def _find_unlisted_memory(node: Node, gpu: Gpu) -> Iterator[FitnessProblem]:
    held = unlisted_memory(gpu)
    if any(_name(node, process) == MPS_COMM for process in gpu.processes):
        held = "MPS need not list its clients"
    if isinstance(held, str):
        problem = _problem(gpu, f"memory without a listed process is not seen: {held}")
        yield replace(problem, action="none", status="fit")
    elif (
        held > MAX_UNLISTED_BYTES
        and node.state.snapshot.time - node.released.get(gpu.identity.uuid, 0.0) >= RELEASE_SECONDS
    ):
        where = "" if pid_namespace.is_initial() else " to a container"
        yield _problem(gpu, f"{format_bytes(held)} held by processes that the driver does not list{where}")


def find_zombies(node: Node) -> Iterator[FitnessProblem]:
    """Find processes that have ended and still hold a GPU."""
    for gpu in node.gpus:
        for process in gpu.processes:
            stat = procfs.read_stat(process.pid) if process.pid in node.state.owners.identities else None
            if stat is not None and stat.state == b"Z":
                yield _problem(gpu, f"zombie {_name(node, process)} (pid {process.pid}) still holds it")


def _holds(node: Node, process: GpuProcess) -> bool:
    """Return whether a process really keeps a GPU from the next job: not if it ended since the poll."""
    if process.type == "graphics" or (process.memory is not None and process.memory < MIN_HELD_BYTES):
        return False
    identity = node.state.owners.identities.get(process.pid)
    if identity is None:  # of another pid namespace, or of a simulation
        return True
    return identity.comm not in SERVICES and procfs.read_stat(process.pid) is not None


def _name(node: Node, process: GpuProcess) -> str:
    identity = node.state.owners.identities.get(process.pid)
    return identity.comm if identity and identity.comm else "a process"


def find_persistence_off(node: Node) -> Iterator[FitnessProblem]:
    """Find GPUs without persistence mode; a display keeps the driver loaded as well."""
    if any(gpu.value(GpuReadings.display_active) for gpu in node.gpus):
        return
    yield from reading_is(GpuReadings.persistence_mode, 0.0, "persistence mode is off")(node)


def find_mig_changes(node: Node) -> Iterator[FitnessProblem]:
    """Find MIG modes that change at the next reset, and another number of instances than configured."""
    for gpu in node.gpus:
        now, later = (gpu.value(GpuReadings.mig_mode, setting) for setting in ("current", "pending"))
        if None not in (now, later) and now != later:
            yield _problem(gpu, f"MIG is {'on' if now else 'off'}, and {'on' if later else 'off'} after the next reset")
    count, expected = sum(len(gpu.mig) for gpu in node.gpus), node.config.mig_instances
    if expected is not None and count != expected:
        yield FitnessProblem(f"{count} MIG instances, expected {expected}")
