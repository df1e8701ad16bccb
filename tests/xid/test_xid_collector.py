"""XIDs in the metrics, from NVML through the real binding and from a kernel log; each fault counts once."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_log_fifo import Fifo
from services import Daemon, end_processes, wait_until

from gpuwarden.capture.simulation import Simulation
from gpuwarden.gpu.snapshot import EventCount, Snapshot
from gpuwarden.host.kernel_log import KernelLog
from gpuwarden.nvml.constants import OPERATIONAL_GROUP_SIMULATED, OPERATIONAL_PRIMARY
from gpuwarden.xid.kernel_messages import PREFIXES
from gpuwarden.xid.xid_collector import IDENTIFY_SECONDS, MAX_UNRESOLVED, XidCollector
from mock_nvml import MockNvml
from snapshots import gpu, snapshot

LOST = "GPU has fallen off the bus."


class Box:
    """A daemon on two mock GPUs, with a kernel log of its own."""

    def __init__(self, folder: Path, mock: MockNvml, kernel_log: Path, **settings: str) -> None:
        self._folder, self._env = folder, mock.env(gpus=2, **settings)
        self._config = folder / "config.yaml"
        self._config.write_text(f"kernel_log:\n  path: {kernel_log}\npoll:\n  interval: 250ms\n")
        self.daemon = self.start()

    def start(self) -> Daemon:
        """Start a daemon."""
        return Daemon(self._folder, "--config", str(self._config), env=self._env)

    def sample(self, pattern: str) -> str:
        """Return the value of the one sample that matches; empty for none."""
        found = re.findall(rf"^{pattern} (\S+)$", self.daemon.page(), re.MULTILINE)
        assert len(found) < 2, found
        return found[0] if found else ""

    def count(self, index: int, code: int) -> str:
        """Return a GPU's count of an XID."""
        return self.sample(rf'gpuwarden_gpu_xid_events_total{{uuid="GPU-\S+{index}",xid="{code}"}}')

    def severities(self, index: int, code: int) -> set[str]:
        """Return the severities that events of an XID had."""
        name = "gpuwarden_gpu_xid_severity_last_event_timestamp_seconds"
        pattern = rf'^{name}{{severity="(\w+)",uuid="GPU-\S+{index}",xid="{code}"}}'
        return set(re.findall(pattern, self.daemon.page(), re.MULTILINE))

    def time(self, index: int, code: int) -> float:
        """Return the time of a GPU's last XID."""
        return float(
            self.sample(rf'gpuwarden_gpu_xid_last_event_timestamp_seconds{{uuid="GPU-\S+{index}",xid="{code}"}}')
        )

    def access(self, source: str) -> str:
        """Return the access metric of a source."""
        return self.sample(rf'gpuwarden_access{{source="{source}"}}')


@pytest.fixture
def box(tmp_path: Path, mock_nvml: MockNvml, fifo: Fifo) -> Iterator[Box]:
    """Start a daemon that receives XIDs."""
    box = Box(tmp_path, mock_nvml, fifo.path)
    with end_processes(box.daemon):
        wait_until(lambda: box.access("nvml_events") == "1.0", "the events are listened to")
        yield box


def test_first_xid_is_counted(box: Box, mock_nvml: MockNvml) -> None:
    """An XID has no series until it occurs; then a count, its time, and a log line with the action."""
    assert "gpuwarden_gpu_xid_" not in box.daemon.page()
    before = time.time()
    mock_nvml.xid(1, 48)
    wait_until(lambda: box.count(1, 48) == "1.0", "the XID")
    assert before <= box.time(1, 48) <= time.time()
    assert re.search(
        r'ERROR XID reported gpu=GPU-\S+1 index=1 xid=48 seconds_ago=0 meaning="[^"]*memory error.*reset it',
        box.daemon.output(),
    )


def test_xids_are_counted_by_gpu_and_code(box: Box, mock_nvml: MockNvml) -> None:
    """Counts are separate for each GPU and code, unknown codes included."""
    for index, code in ((0, 13), (0, 13), (1, 13), (0, 4000)):
        mock_nvml.xid(index, code)
    wait_until(lambda: box.count(0, 4000) == "1.0", "the last XID")
    assert (box.count(0, 13), box.count(1, 13), box.count(1, 4000)) == ("2.0", "1.0", "")


def test_lost_gpu_keeps_its_xid(box: Box, mock_nvml: MockNvml, fifo: Fifo) -> None:
    """XID 79 of a lost GPU is exported along with up 0, and counted once for all sources."""
    mock_nvml.lose(1)
    fifo.write(f"NVRM: Xid (PCI:0000:11:00): 79, pid=1, {LOST}", f"NVRM: GPU 0000:11:00.0: {LOST}")
    mock_nvml.xid(1, 79)
    wait_until(lambda: box.sample(r'gpuwarden_gpu_up{uuid="GPU-\S+1"}') == "0.0", "the loss")
    wait_until(lambda: box.count(1, 79), "the XID")
    mock_nvml.xid(0, 31)  # arrives after all of the above
    fifo.write("NVRM: Xid (PCI:0000:10:00): 13, pid=1")
    wait_until(lambda: box.count(0, 31) and box.count(0, 13), "the next XIDs")
    assert box.count(1, 79) == "1.0"


def test_operational_events(tmp_path: Path, mock_nvml: MockNvml, fifo: Fifo) -> None:
    """A fault under R615 has severity, category, role and the driver's time; its XID counts once for all sources."""
    box = Box(tmp_path, mock_nvml, fifo.path, driver="615.32")
    kind = r'{category="interconnect_error",role="primary",severity="fatal",uuid="GPU-\S+1"}'
    with end_processes(box.daemon):
        wait_until(lambda: box.access("nvml_events") == "1.0", "the events are listened to")
        assert "gpuwarden_gpu_operational" not in box.daemon.page()
        began = time.time()
        mock_nvml.operational(1, 79, attributes=OPERATIONAL_PRIMARY, ago=1.0)
        mock_nvml.xid(1, 79)
        fifo.write(f"NVRM: Xid (PCI:0000:11:00): 79, pid=1, {LOST}", f"NVRM: GPU 0000:11:00.0: {LOST}")
        mock_nvml.operational(1, severity=30, category=1, group_attributes=OPERATIONAL_GROUP_SIMULATED)
        mock_nvml.xid(0, 31)
        fifo.write("NVRM: Xid (PCI:0000:10:00): 13, pid=1")
        wait_until(lambda: box.count(0, 31) and box.count(0, 13), "what came after")
        assert box.count(1, 79) == "1.0"
        assert box.sample(f"gpuwarden_gpu_operational_events_total{kind}") == "1.0"
        happened = float(box.sample(f"gpuwarden_gpu_operational_last_event_timestamp_seconds{kind}"))
        assert began - 1.5 < happened < began  # a second ago, when it was raised
        assert 'severity="recoverable"' not in box.daemon.page()
        logged = (
            r"ERROR operational event gpu=GPU-\S+1 severity=fatal category=interconnect_error role=primary .* xids=79"
        )
        assert re.search(logged, box.daemon.output())
        assert "WARNING operational event" in box.daemon.output()


def test_severity_by_the_text_of_the_kernel_log(box: Box, fifo: Fifo) -> None:
    """An NVLink error has the severity of the driver's flag, which the name of a process cannot forge."""
    name = "x, A Fatal XC"
    fifo.write(
        "NVRM: Xid (PCI:0000:10:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)",
        "NVRM: Xid (PCI:0000:10:00): 149, pid=1234, name=python3, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6)",
        f"NVRM: Xid (PCI:0000:11:00): 144, pid=7, name={name}, SAW_MVB Nonfatal XC0 i0 Link 00 (0x00000001 0x00000004)",
        "NVRM: Xid (PCI:0000:11:00): 146, TLW_CTRL",
    )
    wait_until(lambda: box.count(1, 146), "the XIDs")
    assert {(index, code): box.severities(index, code) for index, code in ((0, 145), (0, 149), (1, 144), (1, 146))} == {
        (0, 145): {"info"},
        (0, 149): {"critical"},
        (1, 144): {"info"},
        (1, 146): {"warning"},
    }


@pytest.mark.parametrize(
    ("target", "severity", "logged"),
    [
        ("0x0 (None)", "info", "The GPU recovered"),
        ("0x1 (GPU Reset Required)", "critical", "reset it"),
        ("0x1 (PF FLR)", "critical", "reset it"),
        ("0x2 (OS Reboot)", "critical", "Restart the machine"),
        ("0x3 (Drain P2P)", "warning", "exchange data with other GPUs"),
        ("0x4 (Drain and Reset)", "warning", "when its work is done"),
        ("0x63 (A newer action)", "warning", "nvidia-smi -q"),
    ],
)
def test_recovery_action_has_the_severity_of_its_target(
    fifo: Fifo, caplog: pytest.LogCaptureFixture, target: str, severity: str, logged: str
) -> None:
    """XID 154 is as grave as the action that the driver requires from now on, in the words of any driver."""
    caplog.set_level(logging.INFO)
    bench = CollectorBench(fifo)
    fifo.write(f"NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x5 (Recover) to {target}")
    assert list(bench.poll(snapshot(gpu(1))).gpus[0].xids[154].by_severity) == [severity]
    assert logged in caplog.messages[-1]


@pytest.mark.parametrize("first", ["nvml", "kernel_log"])
def test_sources_are_merged(box: Box, mock_nvml: MockNvml, fifo: Fifo, first: str) -> None:
    """A fault reported by both sources counts once, in either order; so does one only in the kernel log."""
    sources: dict[str, Callable[[], None]] = {
        "nvml": lambda: mock_nvml.xid(0, 94),
        "kernel_log": lambda: fifo.write("NVRM: Xid (PCI:0000:10:00): 94, p"),
    }
    sources.pop(first)()
    wait_until(lambda: box.count(0, 94) == "1.0", "the XID")
    ((_name, second),) = sources.items()
    second()
    mock_nvml.xid(0, 13)
    fifo.write("NVRM: Xid (PCI:0000:10:00): 62, p")
    wait_until(lambda: box.count(0, 13) and box.count(0, 62), "what came after")
    assert box.count(0, 94) == "1.0"


@pytest.mark.slow
def test_driver_that_comes_back(box: Box, mock_nvml: MockNvml) -> None:
    """Counts continue after the driver was reloaded."""
    mock_nvml.xid(0, 31)
    wait_until(lambda: box.count(0, 31) == "1.0", "the XID")
    mock_nvml.error("*", "*", "UNINITIALIZED")
    wait_until(lambda: box.access("nvml_events") == "0.0", "the driver's loss")
    assert box.count(0, 31) == "1.0"  # unchanged throughout
    mock_nvml.clear()
    wait_until(lambda: box.access("nvml_events") == "1.0", "the events are listened to")
    mock_nvml.xid(0, 31)
    wait_until(lambda: box.count(0, 31) == "2.0", "the next XID")


def test_without_events_the_kernel_log_is_counted(tmp_path: Path, mock_nvml: MockNvml, fifo: Fifo) -> None:
    """A driver without events is no error: the access metric shows it, and the kernel log's XIDs are counted."""
    mock_nvml.error("*", "nvmlDeviceRegisterEvents", "NOT_SUPPORTED")
    box = Box(tmp_path, mock_nvml, fifo.path)
    with end_processes(box.daemon):
        fifo.write("NVRM: Xid (PCI:0000:10:00): 62, p")
        wait_until(lambda: box.count(0, 62) == "1.0", "the XID")
        assert (box.access("nvml_events"), box.access("kernel_log")) == ("0.0", "1.0")


def test_without_kernel_log_the_events_are_counted(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A log that may not be read is no error either."""
    box = Box(tmp_path, mock_nvml, tmp_path / "missing")
    with end_processes(box.daemon):
        wait_until(lambda: box.access("nvml_events") == "1.0", "the events are listened to")
        mock_nvml.xid(0, 62)
        wait_until(lambda: box.count(0, 62) == "1.0", "the XID")
        assert box.access("kernel_log") == "0.0"
        assert "gpuwarden_kernel_log_records_lost_total " not in box.daemon.page()


def test_restart_counts_what_the_kernel_log_has(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """XIDs from before the daemon's start are counted from the kernel log, with their time."""
    log = tmp_path / "kmsg"
    microseconds = (time.monotonic() - 100) * 1e6
    log.write_text(f"4,7,{microseconds:.0f},-;NVRM: Xid (PCI:0000:11:00): 79, pid=1, {LOST}\n")
    box = Box(tmp_path, mock_nvml, log)
    with end_processes(box.daemon):
        assert box.count(1, 79) == "1.0"
        assert box.time(1, 79) == pytest.approx(time.time() - 100, abs=10)
        box.daemon.kill(signal.SIGKILL)
        box.daemon = box.start()
        with end_processes(box.daemon):
            assert box.count(1, 79) == "1.0"


class CollectorBench:
    """A collector without events, on a kernel log only."""

    def __init__(self, fifo: Fifo) -> None:
        self.collector = XidCollector(Simulation(gpus=1).nvml)
        self._log = KernelLog(PREFIXES, fifo.path)

    def poll(self, *snapshots: Snapshot) -> Snapshot:
        """Poll by hand; return the last snapshot with its XIDs."""
        for each in snapshots:
            attached = self.collector.attach(each, self._log.read())
        return attached


def test_xid_of_an_unknown_gpu_waits_for_it(fifo: Fifo) -> None:
    """A logged XID of a GPU that has not been identified yet is counted when it is."""
    bench = CollectorBench(fifo)
    fifo.write("NVRM: Xid (PCI:0000:01:00): 62, p")
    assert bench.poll(snapshot(gpu(0))).gpus[0].xids == {}
    found = bench.poll(snapshot(gpu(0), gpu(1)), snapshot(gpu(0), gpu(1)))
    assert [{code: xid.count for code, xid in gpu.xids.items()} for gpu in found.gpus] == [{}, {62: 1}]
    assert bench.collector.dropped == {"unknown_gpu": 0, "codes": 0}


def test_xids_of_unknown_gpus_are_bounded(fifo: Fifo) -> None:
    """A limited number of XIDs waits, and the rest is counted as dropped."""
    bench = CollectorBench(fifo)
    for _ in range(3):
        fifo.write(*["NVRM: Xid (PCI:0000:01:00): 62, p"] * (MAX_UNRESOLVED // 2))
        bench.poll(snapshot(gpu(0)))
    assert bench.collector.dropped == {"unknown_gpu": MAX_UNRESOLVED // 2, "codes": 0}
    assert bench.poll(snapshot(gpu(1))).gpus[0].xids[62].count == MAX_UNRESOLVED


def test_xid_of_a_gpu_lost_before_the_start(
    fifo: Fifo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with the address and the action, and counted, but only after every GPU had time to answer."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 1000)  # longer than the machine's real uptime
    bench = CollectorBench(fifo)
    fifo.write(f"NVRM: Xid (PCI:0000:07:00): 79, pid=1, {LOST}", f"NVRM: GPU 0000:07:00.0: {LOST}", age=600)
    bench.poll(snapshot(gpu(0)))
    assert (bench.collector.dropped["unknown_gpu"], caplog.messages) == (0, [])
    monkeypatch.setattr(time, "monotonic", lambda: now() + 1000 + IDENTIFY_SECONDS)
    for _ in range(3):
        bench.poll(snapshot(gpu(0)))
    assert bench.collector.dropped["unknown_gpu"] == 1  # the kernel logged it twice
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert re.match(
        r"XID of an unknown GPU, not counted pci=0000:07:00\.0 xid=79 seconds_ago=6\d\d .*Restart the machine",
        record.message,
    )
    found = bench.poll(snapshot(gpu(0), gpu(7)))
    assert [{code: xid.count for code, xid in gpu.xids.items()} for gpu in found.gpus] == [{}, {79: 1}]
    assert bench.collector.dropped["unknown_gpu"] == 1  # a counter does not fall


def test_xid_of_unknown_gpu_is_dropped_once(fifo: Fifo, monkeypatch: pytest.MonkeyPatch) -> None:
    """An XID that was dropped after waiting too long is not counted again when it exceeds the limit."""
    bench = CollectorBench(fifo)
    fifo.write("NVRM: Xid (PCI:0000:07:00): 62, p")
    bench.poll(snapshot(gpu(0)))
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + IDENTIFY_SECONDS)
    bench.poll(snapshot(gpu(0)))
    assert bench.collector.dropped["unknown_gpu"] == 1
    fifo.write(*["NVRM: Xid (PCI:0000:07:00): 62, p"] * MAX_UNRESOLVED)
    bench.poll(snapshot(gpu(0)))
    assert bench.collector.dropped["unknown_gpu"] == 1
    assert len(bench.collector._unresolved) == MAX_UNRESOLVED


def test_clock_set_back_leaves_no_xid_in_the_future(fifo: Fifo, monkeypatch: pytest.MonkeyPatch) -> None:
    """An XID dated by a clock a year ahead would count as recent for a year."""
    bench = CollectorBench(fifo)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 365 * 86400)
    fifo.write("NVRM: Xid (PCI:0000:00:00): 62, p")
    ahead = bench.poll(snapshot(gpu(0))).gpus[0].xids[62]
    assert ahead.last > now + 364 * 86400
    monkeypatch.setattr(time, "time", lambda: now)
    assert bench.poll(snapshot(gpu(0))).gpus[0].xids == {62: EventCount(1, now, {"critical": now})}
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert bench.poll(snapshot(gpu(0))).gpus[0].xids == {62: EventCount(1, now, {"critical": now})}


def test_replacement_gpu_gets_the_xids_of_its_address(fifo: Fifo) -> None:
    """If two GPUs had the same address, the XID belongs to the one that answers now."""
    bench = CollectorBench(fifo)
    old, new = gpu(1), gpu(2)
    old = replace(old, fault="gpu_is_lost")
    new = replace(new, identity=replace(new.identity, pci_bus_id=old.identity.pci_bus_id))
    fifo.write("NVRM: Xid (PCI:0000:01:00): 62, p")
    for order in ((old, new), (new, old)):
        found = bench.poll(snapshot(*order))
        assert {gpu.identity.uuid for gpu in found.gpus if gpu.xids} == {"GPU-2"}


def test_flood_is_logged_a_few_times(fifo: Fifo, caplog: pytest.LogCaptureFixture) -> None:
    """XIDs of one code and GPU are logged once a minute, at the level of their severity; all are counted."""
    caplog.set_level(logging.INFO)
    bench = CollectorBench(fifo)
    fifo.write(*["NVRM: Xid (PCI:0000:01:00): 31, p", "NVRM: Xid (PCI:0000:01:00): 63, p"] * 50)
    found = bench.poll(snapshot(gpu(1)))
    assert found.gpus[0].xids[31].count == found.gpus[0].xids[63].count == 50
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    fifo.write(*[f"NVRM: Xid (PCI:0000:01:00): {code}, p" for code in range(1, 60)])
    bench.poll(snapshot(gpu(1)))
    assert len(caplog.records) == 20
