"""A GPU and its MIG instances in `/api/v1/state`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuwarden import thresholds
from gpuwarden.api.form import Form, Json, Key, Written, active, by_label, flag, joined, listed, said
from gpuwarden.api.troubles import Judged, Trouble, gravest
from gpuwarden.gpu.advice import gpu_advice
from gpuwarden.gpu.snapshot import Gpu, MigInstance, XidCount
from gpuwarden.gpu.table import GpuReadings, MigReadings
from gpuwarden.gpu.xid import explain
from gpuwarden.metric import Metric
from gpuwarden.protocol import RESOURCES
from gpuwarden.runs.run import Run
from gpuwarden.state import State


class Tightest(NamedTuple):
    """The run on a device that is closest to out of memory; bytes."""

    run_id: str
    headroom: float
    share: float  # of what it uses and can still allocate, the part it can still allocate


class Held(NamedTuple):
    """What reporting runs have of a device: bytes that their allocators have handed out, and the tightest of them."""

    in_use: int = 0
    tightest: Tightest | None = None


NOBODY = Held()


def held(runs: Iterable[Run]) -> Mapping[str, Held]:
    """Return what runs have of each GPU and MIG instance, by UUID."""
    found: dict[str, Held] = {}
    for run in runs:
        for uuid, memory in run.memory.items():
            before = found.get(uuid, NOBODY)
            left = run.headroom.get(uuid)
            tightest = before.tightest
            if left is not None:
                whole = left + memory.current
                this = Tightest(run.peer.run_id, left, left / whole if whole else 0.0)
                tightest = this if tightest is None or this.share < tightest.share else tightest
            found[uuid] = Held(before.in_use + memory.current, tightest)
    return found


Owner = tuple[str, str, int]  # kind, name, and bytes that its processes hold


class SeenGpu(NamedTuple):
    """A GPU with all that the poll has to say of it."""

    gpu: Gpu
    state: State
    held: Mapping[str, Held]
    troubles: Sequence[Trouble]
    owners: Sequence[Owner]

    @property
    def own(self) -> Held | None:
        """What reporting runs have of it; None where none is there."""
        return self.held.get(self.gpu.identity.uuid)


class SeenInstance(NamedTuple):
    """Likewise, a MIG instance."""

    instance: MigInstance
    state: State
    held: Held | None


@dataclass(frozen=True, slots=True)
class _SeenXid:
    code: int
    count: XidCount


def _xids(seen: SeenGpu) -> list[Json]:
    now = seen.state.snapshot.time
    lately = ((code, each) for code, each in seen.gpu.xids.items() if now - each.last < thresholds.XID_SECONDS)
    return [XID.write(_SeenXid(*each)) for each in sorted(lately, key=lambda pair: -pair[1].last)]


def _owners(state: State) -> Mapping[str, Sequence[Owner]]:
    """Return who holds memory of each GPU, by UUID, those with most first."""
    found: dict[str, list[Owner]] = {}
    for (uuid, kind, name), size in state.owners.memory.items():
        found.setdefault(uuid, []).append((kind, name, size))
    for each in found.values():
        each.sort(key=lambda owner: -owner[2])
    return found


def _mig(seen: SeenGpu) -> list[Json]:
    return [INSTANCE.write(SeenInstance(each, seen.state, seen.held.get(each.identity.uuid))) for each in seen.gpu.mig]


def _status(seen: SeenGpu) -> str:
    if not seen.gpu.asked:
        return "asleep" if seen.state.snapshot.asleep.get(seen.gpu.identity.uuid) else "not_asked"
    return "up" if seen.gpu.fault is None else "fault"


def _condition(seen: SeenGpu) -> str:
    return gravest(seen.troubles) if seen.gpu.asked else "unknown"


def _pressure(state: State, uuid: str) -> dict[str, str]:
    return {resource: level for resource in RESOURCES if (level := state.pressure.levels.get((uuid, resource)))}


def _ecc_errors(seen: SeenGpu) -> dict[str, dict[str, float]]:
    """Sum up the errors of all places in memory."""
    found: dict[str, dict[str, float]] = {}
    reading = seen.gpu.readings.get(GpuReadings.ecc_errors_total)
    if isinstance(reading, Mapping):
        for (kind, lifetime, _location), count in reading.items():
            of_kind = found.setdefault(kind, {})
            of_kind[lifetime] = of_kind.get(lifetime, 0) + int(count)  # type: ignore[arg-type] # no histogram
    return found


def _headroom(found: Held | None, free: float | None) -> float | None:
    return found.tightest.headroom if found and found.tightest else free if found is None else None


def _steady(row: Metric[Any]) -> bool:
    return row.tier in ("slow", "static")


def _value(name: str, row: Metric[Any]) -> Key[SeenGpu]:
    return Key(name, said(row), lambda seen: seen.gpu.readings.get(row), steady=_steady(row))


def _flag(name: str, row: Metric[Any]) -> Key[SeenGpu]:
    return Key(name, said(row), lambda seen: flag(seen.gpu.readings.get(row)), steady=_steady(row))


def _labelled(name: str, row: Metric[Any]) -> Key[SeenGpu]:
    meaning = f"{said(row)} By {row.labels[0]}."
    return Key(name, meaning, lambda seen: by_label(seen.gpu.readings.get(row)), steady=_steady(row))


def _of_instance(name: str, row: Metric[Any]) -> Key[SeenInstance]:
    return Key(name, said(row), lambda seen: seen.instance.readings.get(row))


def _text(read: Callable[[SeenGpu], str]) -> Callable[[SeenGpu], str | None]:
    return lambda seen: read(seen) or None


_IN_USE = "Bytes that the allocators of reporting runs have handed out there; not there without such a run."
_HEADROOM = (
    "Bytes that can still be allocated there: by the reporting run that is closest to out of memory, without one the "
    "free memory (headroom.md). Not there where a run reports whose headroom is not known."
)
_SHARE = "Of what that run uses and can still allocate, the part that it can still allocate."
_PRESSURE = "How close it is to its limits, by resource (memory, thermal): none, some or critical (pressure.md)."

# fmt: off
TROUBLE = Form[Trouble](
    "Each of `troubles`",
    "One thing that is wrong with a GPU or a run.",
    (
        Key("level", "How grave it is: warning or critical, as in the alerts.", lambda each: each.level, always=True),
        Key("text", "What it is, in a few words.", lambda each: each.text, always=True),
    ),
)
XID = Form[_SeenXid](
    "Each of `xids`",
    "A fault that the driver reported (xid.md).",
    (
        Key("xid", "Its code.", lambda each: each.code, always=True),
        Key("count", "How often it came, as far as is known.", lambda each: each.count.count, always=True),
        Key("last_timestamp_seconds", "When it came last, in Unix time.", lambda each: each.count.last, always=True),
        Key("meaning", "What it means.", lambda each: explain(each.code).meaning, always=True),
        Key("action", "What to do.", lambda each: explain(each.code).action.value, always=True),
        Key("severity", "page, warn or info.", lambda each: explain(each.code).severity, always=True),
    ),
)
OWNER = Form[Owner](
    "Each of `owners`",
    "Who holds memory of the GPU (owners.md). One process has owners of several kinds, and counts for each.",
    (
        Key("kind", "user, container, pod, slurm_job, systemd_unit or run.", lambda each: each[0], always=True),
        Key("name", "Its name; of a run its id.", lambda each: each[1], always=True),
        Key("memory_bytes", "What its processes hold.", lambda each: each[2], always=True),
    ),
)
INSTANCE = Form[SeenInstance](
    "Each of `mig`",
    "A MIG instance of the GPU.",
    (
        Key("uuid", "Its UUID.", lambda seen: seen.instance.identity.uuid, always=True),
        Key("gpu_instance", "Number of the GPU instance.", lambda seen: seen.instance.identity.gpu_instance, always=True),
        Key("compute_instance", "Number of the compute instance in it.", lambda seen: seen.instance.identity.compute_instance, always=True),
        Key("profile", "NVIDIA's name of its size, 1g.10gb say.", lambda seen: seen.instance.identity.profile or None),
        _of_instance("memory_size_bytes", MigReadings.memory_size_bytes),
        _of_instance("memory_used_bytes", MigReadings.memory_used_bytes),
        _of_instance("memory_free_bytes", MigReadings.memory_free_bytes),
        _of_instance("memory_reserved_bytes", MigReadings.memory_reserved_bytes),
        Key("memory_in_use_bytes", _IN_USE, lambda seen: seen.held.in_use if seen.held else None),
        Key("headroom_bytes", _HEADROOM, lambda seen: _headroom(seen.held, seen.instance.value(MigReadings.memory_free_bytes))),
        Key("headroom_ratio", _SHARE, lambda seen: t.share if seen.held and (t := seen.held.tightest) else None),
        Key("headroom_run_id", "Which run that is.", lambda seen: t.run_id if seen.held and (t := seen.held.tightest) else None),
        Key("pressure", _PRESSURE, lambda seen: _pressure(seen.state, seen.instance.identity.uuid)),
    ),
)
GPU = Form[SeenGpu](
    "Each of `gpus`",
    "One GPU, in the order of the driver's numbers. Where it did not answer it has none of the readings.",
    (
        Key("uuid", "Its UUID.", lambda seen: seen.gpu.identity.uuid, always=True, steady=True),
        Key("index", "The driver's number for it, which a restart may change.", lambda seen: seen.gpu.identity.index, always=True, steady=True),
        Key("name", "What kind of GPU it is.", lambda seen: seen.gpu.identity.name, always=True, steady=True),
        Key("pci_bus_id", "Where it is plugged in.", _text(lambda seen: seen.gpu.identity.pci_bus_id), steady=True),
        Key("serial", "Its serial number.", _text(lambda seen: seen.gpu.identity.serial), steady=True),
        Key("architecture", "NVIDIA's name of its architecture.", _text(lambda seen: seen.gpu.identity.architecture), steady=True),
        Key("vbios_version", "Version of its firmware.", _text(lambda seen: seen.gpu.identity.vbios_version), steady=True),
        Key("status", "up, fault (it does not answer), asleep, or not_asked (a pause).", _status, always=True),
        Key("fault", "Why it does not answer, by the driver's name of the error.", lambda seen: seen.gpu.fault),
        Key("fault_advice", "What to do about that.", lambda seen: gpu_advice(f) if (f := seen.gpu.fault) else None),
        Key("condition", "ok, warning or critical: the worst of its troubles; unknown where it was not asked.", _condition, always=True),
        Key("troubles", "What is wrong with it, the worst first.", lambda seen: list(map(TROUBLE.write, seen.troubles)), part=TROUBLE),
        Key("last_success_timestamp_seconds", "When it last answered, in Unix time.", lambda seen: seen.gpu.last_success),
        _value("memory_size_bytes", GpuReadings.memory_size_bytes),
        _value("memory_used_bytes", GpuReadings.memory_used_bytes),
        _value("memory_free_bytes", GpuReadings.memory_free_bytes),
        _value("memory_reserved_bytes", GpuReadings.memory_reserved_bytes),
        _flag("memory_unified", GpuReadings.memory_unified),
        _labelled("memory_used_peak_bytes", GpuReadings.memory_used_peak_bytes),
        Key("memory_in_use_bytes", _IN_USE, lambda seen: seen.own.in_use if seen.own else None),
        Key("headroom_bytes", _HEADROOM, lambda seen: _headroom(seen.own, seen.gpu.value(GpuReadings.memory_free_bytes))),
        Key("headroom_ratio", _SHARE, lambda seen: t.share if seen.own and (t := seen.own.tightest) else None),
        Key("headroom_run_id", "Which run that is.", lambda seen: t.run_id if seen.own and (t := seen.own.tightest) else None),
        _labelled("temperature_celsius", GpuReadings.temperature_celsius),
        _labelled("temperature_threshold_celsius", GpuReadings.temperature_threshold_celsius),
        _value("temperature_margin_celsius", GpuReadings.temperature_margin_celsius),
        _labelled("temperature_margin_threshold_celsius", GpuReadings.temperature_margin_threshold_celsius),
        _labelled("fan_speed_ratio", GpuReadings.fan_speed_ratio),
        _value("utilization_ratio", GpuReadings.utilization_ratio),
        _value("memory_bandwidth_utilization_ratio", GpuReadings.memory_bandwidth_utilization_ratio),
        _labelled("clock_hertz", GpuReadings.clock_hertz),
        _labelled("clock_max_hertz", GpuReadings.clock_max_hertz),
        Key("clock_event_reasons", "What holds the clocks down now. `gpuwarden_gpu_clock_event_active`.", lambda seen: active(seen.gpu.readings.get(GpuReadings.clock_event_active))),
        _value("performance_state", GpuReadings.performance_state),
        _value("power_usage_watts", GpuReadings.power_usage_watts),
        _labelled("power_limit_watts", GpuReadings.power_limit_watts),
        Key("pressure", _PRESSURE, lambda seen: _pressure(seen.state, seen.gpu.identity.uuid)),
        Key("xids", "XIDs of the last hour, the latest first.", _xids, part=XID),
        Key("ecc_errors", "Memory errors by type, and then by lifetime, over all places. `gpuwarden_gpu_ecc_errors_total`.", _ecc_errors, steady=_steady(GpuReadings.ecc_errors_total)),
        _labelled("remapped_rows", GpuReadings.remapped_rows),
        _flag("row_remap_pending", GpuReadings.row_remap_pending),
        _flag("row_remap_failed", GpuReadings.row_remap_failed),
        _labelled("retired_pages", GpuReadings.retired_pages),
        _flag("retired_pages_pending", GpuReadings.retired_pages_pending),
        _flag("memory_unrepairable", GpuReadings.memory_unrepairable),
        _flag("reset_required", GpuReadings.reset_required),
        Key("owners", "Who holds its memory, those with most first.", lambda seen: list(map(OWNER.write, seen.owners)), part=OWNER),
        Key("mig", "Its MIG instances.", _mig, part=INSTANCE),
    ),
)
# fmt: on
_STEADY, _OTHER = (
    Form(GPU.title, GPU.about, (key for key in GPU.keys if key.steady is steady)) for steady in (True, False)
)


class GpuWriter:
    """Writes the GPUs of polls, and only once what stays as it is until the slow readings are taken anew."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, Written]] = {}  # by UUID, with what it holds for

    def write(self, judged: Judged) -> Written:
        """Write those of a poll, a list."""
        state = judged.state
        found, owners = held(state.runs), _owners(state)
        seen = [
            SeenGpu(gpu, state, found, troubles, owners.get(gpu.identity.uuid, ())) for gpu, troubles in judged.gpus
        ]
        old, self._kept = self._kept, {}
        return listed(joined(self._steady(each, old), _OTHER.write(each)) for each in seen)

    def _steady(self, seen: SeenGpu, old: Mapping[str, tuple[object, Written]]) -> Written:
        gpu = seen.gpu
        holds_for = gpu.identity, gpu.up, gpu.slow_taken
        kept = old.get(gpu.identity.uuid)
        if kept is None or kept[0] != holds_for:
            kept = holds_for, joined(_STEADY.write(seen))
        self._kept[gpu.identity.uuid] = kept
        return kept[1]
