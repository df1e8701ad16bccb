"""Poller of all GPUs. It calls the driver on threads, so that a call that hangs affects only its own GPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpuwarden.fairness.log_limiter import ChangeLog
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.call_pool import CallPool, RepeatedCall, wait_for_all
from gpuwarden.gpu.memory_sampler import MemorySampler
from gpuwarden.gpu.polled_gpu import PolledGpu
from gpuwarden.gpu.reader import DEFAULT_PLAN, GpuReader, Plan
from gpuwarden.gpu.runtime_suspend import SuspendMonitor
from gpuwarden.gpu.snapshot import GPUS_HIDDEN, HUNG, Gpu, Snapshot
from gpuwarden.host.host_reader import HostMemory, read_host_memory
from gpuwarden.nvml.events.event_listener import EventListener
from gpuwarden.nvml.events.event_sources import SystemEventSource
from gpuwarden.nvml.events.model import DriverBinding
from gpuwarden.nvml.identity import GpuIdentity, provisional_identity
from gpuwarden.nvml.interface import Handle, Nvml
from gpuwarden.nvml.return_codes import NO_PERMISSION, NVMLError, code_of, error_name
from gpuwarden.nvml.session import RETRY_SECONDS, HiddenGpusError, Session
from gpuwarden.nvml.troubleshooting import list_kernel_gpus, suggest_fix

log = logging.getLogger(__name__)

MAX_CALL_SECONDS = 10.0  # timeout of a driver call, unless the interval is shorter
MAX_GPUS = 1024  # looked up at most, whatever count the driver returns
MAX_GONE_GPUS = 256  # shown as down in addition to those the driver lists: a reset may change a UUID
_STEP_SECONDS = 0.01  # between checks whether calls have returned
RELEASE_SECONDS = 10.0  # timeout for calls in progress when the driver is released on request
IDLE_RELEASE_SECONDS = 3.0  # the same within a poll, for runtime suspend
IDLE_RETRY_SECONDS = 60.0  # before that is tried again after a failure
_BINDING_EVENT_SECONDS = 0.2  # the event of an unbinding comes up to so long after the first call that fails
REOPEN_SECONDS = 5.0  # after a reopening, before another one for a GPU that was bound without an event
_SLOW_GROUP_GPUS = 4  # GPUs whose slow tiers share a poll: alone, with cold caches, one costs 1.5 times as much


class DriverUser(Protocol):
    """Part other than the readers that calls the driver on its own thread."""

    name: str  # for messages

    def stop(self) -> None:
        """Start no calls until it gets GPUs again, and release the driver's resources. Does not block."""

    @property
    def idle(self) -> bool:
        """True once it has stopped: no call is in progress, and none will start."""


class StillUsedError(Exception):
    """The driver cannot be released; the text says why, and what to do."""


class Poller:
    """Poller that initializes the driver and reads its GPUs. Used by one event loop, one poll at a time."""

    def __init__(
        self,
        nvml: Nvml,
        interval: float,
        *,
        plan: Plan = DEFAULT_PLAN,
        memory_interval: float = math.inf,
        host_memory: Callable[[], HostMemory] = read_host_memory,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.perf_counter,
        suspend: SuspendMonitor | None = None,
    ) -> None:
        self._nvml = nvml
        self._plan = plan
        self._slots = max(1, int(plan.slow_interval / interval))  # polls over which the slow tiers are spread
        self._host_memory = host_memory
        self._clock = clock
        self._wall = wall
        self._stopwatch = stopwatch
        self._timeout = min(interval, MAX_CALL_SECONDS)
        self._sampler = MemorySampler(memory_interval, self._timeout) if memory_interval < interval else None
        self.bindings = EventListener(SystemEventSource(nvml))
        self._users: list[DriverUser] = [self.bindings, *([self._sampler] if self._sampler else [])]
        self._suspend = suspend
        self._session = Session(nvml)
        self._threads = CallPool()
        self._counting = RepeatedCall(self._threads, self._session.count)
        self._closing = RepeatedCall(self._threads, self._close)
        self.cgroups: Sequence[str] = ()  # folders of the cgroups whose memory limits to read
        self._gpus: dict[str, PolledGpu] = {}  # by UUID
        self._unidentified: dict[int, PolledGpu] = {}  # by index: listed but not yet identified
        self._provisional: dict[int, Gpu] = {}  # those of them that did not answer in this poll
        self._errors: Counter[str] = Counter()
        self.tier_times: dict[str, tuple[int, float]] = {}  # number of readings of all GPUs and their seconds, by tier
        self._changes = ChangeLog()
        self._last_success: float | None = None
        self._enumerated = (0, 0)  # the session, and how many GPUs it had
        self._fault: str | None = None
        self._paused_until: float | None = None  # by the monotonic clock
        self._suspend_retry_at = 0.0  # monotonic
        self._bindings: list[DriverBinding] = []  # since the last poll
        self._wants_reopen, self._reopen_at = False, 0.0  # not earlier than this monotonic time

    @property
    def pending_calls(self) -> int:
        """Number of driver calls of polls that have not returned."""
        return self._threads.pending

    @property
    def uninterruptible(self) -> bool:
        """True if a call hangs where no signal reaches it, so that this process could not be killed."""
        return self._threads.uninterruptible

    @property
    def outdated(self) -> bool:
        """True if the driver was updated, and refuses the library version that this process has loaded."""
        return self._session.outdated

    def register(self, user: DriverUser) -> None:
        """Add a user of the driver, which has to release it whenever the poller does."""
        self._users.append(user)

    async def pause(self, seconds: float) -> None:
        """Release the driver for that time; polls continue without it. Raises StillUsedError within 20 s.

        Not during a poll.
        """
        if self._paused_until is None:
            await self._release(RELEASE_SECONDS, RELEASE_SECONDS)
        self._paused_until = time.monotonic() + seconds

    def resume(self) -> bool:
        """End a pause: the next poll uses the driver again. Return whether there was a pause."""
        paused, self._paused_until = self._paused_until is not None, None
        return paused

    def _note_bindings(self) -> None:
        """Record which GPUs the driver was bound to or unbound from; if there are any, the next poll reopens NVML."""
        for each in self.bindings.drain():
            self._bindings.append(each)
            self._wants_reopen, self._reopen_at = True, 0.0
            gpu = next((gpu for gpu in self._gpus.values() if gpu.identity.has_address(each.pci)), None)
            if gpu and not (each.bound and gpu.is_down):  # one that is down has to answer in the reopened NVML first
                gpu.unbound = not each.bound
            fields = format_fields(pci=each.pci, gpu=gpu.identity.uuid if gpu else None)
            log.warning("driver %s GPU %s", "bound to" if each.bound else "unbound from", fields)

    async def poll(self) -> Snapshot:
        """Read all GPUs; takes at most three intervals and 30 s, however the driver behaves."""
        began, started = self._wall(), self._stopwatch()
        self._bindings.clear()
        self._note_bindings()
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            log.warning("pause ended, polling GPUs again")
            self.resume()
        if self._suspend:
            self._suspend.refresh()
        if self._paused_until is not None or await self._released_for_suspend():
            return self._snapshot(began, started, None, asked=False)
        await self._reopen_if_wanted()
        if self._closing.under_way and not self._closing.is_hung(IDLE_RELEASE_SECONDS):
            return self._snapshot(began, started, None, asked=False)  # every call would wait for the shutdown
        self._counting.start(self._timeout)
        if self._session.open:
            # Together with the count: a second round over the threads costs half a poll's time.
            self._begin([gpu for gpu in self._gpus_to_poll() if gpu.is_open or not self._suspend])
        await wait_for_all(self._threads, [self._counting], self._timeout)
        count = self._collect_count(began)
        self._provisional.clear()
        if count is not None:
            await self._identify_gpus(count)
        # Known GPUs are read even when the driver as a whole fails: each has its own result.
        asked = self._gpus_to_poll()
        self._begin([gpu for gpu in asked if not gpu.reading.awaited])
        await wait_for_all(self._threads, [gpu.reading for gpu in asked], self._timeout)
        if self.bindings.listening and any(gpu.is_newly_lost for gpu in asked):
            await asyncio.sleep(_BINDING_EVENT_SECONDS)  # an unbinding is no fault, and must not be reported as one
        self._note_bindings()
        return self._snapshot(began, started, count, asked=True)

    def _snapshot(self, began: float, started: float, count: int | None, *, asked: bool) -> Snapshot:
        known = sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index)
        wanted = set(self._gpus_to_poll()) if asked else set()
        polled = [gpu.collect() if gpu in wanted else gpu.skip() for gpu in known]
        for gpu in polled:
            for tier, seconds in gpu.tier_seconds.items():
                number, total = self.tier_times.get(tier, (0, 0.0))
                self.tier_times[tier] = number + 1, total + seconds
        gpus = tuple(sorted((*polled, *self._provisional.values()), key=lambda gpu: gpu.identity.index))
        if self._sampler and asked:
            self._sampler.watch(gpu.memory_probe for gpu in known if gpu in wanted and gpu.memory_probe)
        suspend = self._suspend
        if suspend and asked:
            in_use = any(gpu.processes or not gpu.up for gpu in gpus if gpu.asked)
            suspend.record_poll(busy=in_use or self._fault is not None)
        if self._last_success is not None:  # the clock may have been set back: never in the future
            self._last_success = min(self._last_success, began)
        left = None if self._paused_until is None else self._paused_until - time.monotonic()
        return Snapshot(
            time=began,
            duration=self._stopwatch() - started,
            fault=self._fault if asked else None,
            driver=self._session.driver,
            enumerated=count,
            gpus=gpus,
            last_success=self._last_success,
            errors=dict(self._errors),
            asked=asked,
            paused_until=None if left is None else began + left,
            asleep={gpu.identity.uuid: suspend.is_asleep(gpu.identity.pci_bus_id) for gpu in gpus} if suspend else {},
            asleep_count=suspend.asleep_count if suspend else None,
            bindings=tuple(self._bindings),
        )

    def _gpus_to_poll(self) -> list[PolledGpu]:
        """Return the known GPUs to poll: all except suspended ones."""
        if self._suspend is None:
            return list(self._gpus.values())
        return [gpu for gpu in self._gpus.values() if not self._suspend.is_asleep(gpu.identity.pci_bus_id)]

    async def _released_for_suspend(self) -> bool:
        """Release the driver if GPUs may be suspended: only a shutdown closes their devices. Return whether it is."""
        if self._suspend is None or not self._suspend.wants_release or time.monotonic() < self._suspend_retry_at:
            return False
        if self._session.open and not await self._try_release("cannot release driver for runtime suspend"):
            self._suspend_retry_at = time.monotonic() + IDLE_RETRY_SECONDS
            return False
        return True

    async def _reopen_if_wanted(self) -> None:
        """Shut NVML down after a change of bindings: an unbinding waits for that, and only nvmlInit lists GPUs."""
        if time.monotonic() < self._reopen_at:
            return
        for gpu in self._gpus.values():
            # A binding before the new event set was created has no event, but the kernel lists the GPU.
            if gpu.unbound and gpu.is_down and gpu.identity.pci_bus_id in list_kernel_gpus():
                gpu.unbound, self._wants_reopen = False, True
        if not self._wants_reopen:
            return
        self._wants_reopen, self._reopen_at = False, time.monotonic() + REOPEN_SECONDS
        if not await self._try_release("cannot reopen driver"):
            self._wants_reopen, self._reopen_at = True, time.monotonic() + IDLE_RETRY_SECONDS

    async def _try_release(self, failure: str) -> bool:
        """Shut the driver down within a poll; log a failure, and return False. A shutdown in progress is no failure."""
        try:
            await self._release(IDLE_RELEASE_SECONDS, self._timeout)
        except StillUsedError as error:
            if self._closing.under_way:
                return True  # no driver call is made until it ends, or counts as hung
            log.warning("%s %s", failure, format_fields(error=error))
            return False
        return True

    async def _release(self, patience: float, timeout: float) -> None:
        """Wait for calls in progress, and shut the driver down, which closes its devices. Raises StillUsedError."""
        for user in self._users:
            user.stop()
        end = time.monotonic() + patience
        while busy := self._name_call_under_way():
            if time.monotonic() > end:
                raise StillUsedError(
                    f"cannot release the driver: {busy} has not returned for {patience:g} s. "
                    "To reset a GPU, stop gpuwarden instead: systemctl stop gpuwarden"
                )
            await asyncio.sleep(_STEP_SECONDS)
        self._counting.discard()
        self._closing.discard()  # one that hung and returned since: the driver has been initialized again after it
        try:
            await self._closing.run(timeout)
        except TimeoutError:
            raise StillUsedError(
                "nvmlShutdown hangs; to reset a GPU, stop gpuwarden instead: systemctl stop gpuwarden"
            ) from None
        except NVMLError as error:
            raise StillUsedError(f"nvmlShutdown failed: {error}") from None

    def _name_call_under_way(self) -> str:
        """Name a driver call in progress; empty if there is none."""
        if self._counting.under_way or self._closing.under_way:
            return "a driver call"
        for gpu in (*self._gpus.values(), *self._unidentified.values()):
            if gpu.current_call:
                return f"a call to {gpu.current_call}"
        return next((user.name for user in self._users if not user.idle), "")

    def _close(self) -> None:
        """Release all resources and shut the driver down. Runs on a thread while no other thread uses the driver."""
        for gpu in (*self._gpus.values(), *self._unidentified.values()):
            with contextlib.suppress(NVMLError):  # nothing can be released on a lost GPU
                gpu.release()
        self._session.close()

    def arm(self, limits: Mapping[str, float], notify: Callable[[], object]) -> None:
        """Call `notify` once, on another thread, when a GPU uses more memory than its limit or stops answering.

        `limits` are bytes by UUID; GPUs without one never notify, and none does if sampling between polls is off. Valid
        until the next poll.
        """
        for uuid, gpu in self._gpus.items():
            probe = gpu.memory_probe
            if probe is not None and uuid in limits:
                probe.arm(limits[uuid], notify)
            elif probe is not None:
                probe.disarm()

    def stop(self) -> None:
        """Stop all driver calls other than polls; calls in progress end on their own."""
        for user in self._users:
            user.stop()

    def _begin(self, gpus: Iterable[PolledGpu]) -> None:
        for gpu in gpus:
            gpu.reading.start(self._timeout)

    def _collect_count(self, now: float) -> int | None:
        """Return the number of GPUs; None, with the error counted and logged once, if the driver does not answer."""
        self._changes.flush()
        try:
            count = self._counting.collect()
        except TimeoutError:
            self._report_fault(HUNG, "driver calls hang")
        except HiddenGpusError as error:
            self._report_fault(GPUS_HIDDEN, str(error))
        except Exception as error:  # noqa: BLE001 - the driver's own errors, and a binding that misbehaves
            self._report_fault(error_name(error), str(error))
        else:
            self._last_success = now
            if self._fault:
                self._changes.log(logging.WARNING, f"driver answers again {format_fields(gpus=count)}")
            self._fault = None
            return count
        return None

    def _report_fault(self, name: str, text: str) -> None:
        self._errors[name] += 1
        if self._fault != name:
            event = ": ".join(filter(None, ["cannot poll GPUs", suggest_fix(name)]))
            if self._changes.log(logging.ERROR, f"{event} {format_fields(error=name, detail=text)}"):
                # A separate line, at a level that `gpuwarden once` does not show: it tries only once.
                log.info("retrying driver %s", format_fields(interval_seconds=RETRY_SECONDS))
        self._fault = name

    async def _identify_gpus(self, count: int) -> None:
        """Identify the GPUs that the driver lists; one that hangs at the start must not hide the others."""
        if (self._session.number, count) != self._enumerated:
            if self._session.number != self._enumerated[0]:
                for gpu in self._gpus.values():
                    gpu.drop_handle()
            self._enumerated = self._session.number, count
            if count == 0:
                log.warning("driver lists no GPU")
            for index in range(min(count, MAX_GPUS)):
                self._unidentified.setdefault(index, self._new_gpu(index))
        before = set(self._gpus)
        # Those beyond the count are kept: one whose call hangs occupies a thread, and a new object would take another.
        listed = [
            candidate
            for candidate in self._unidentified.items()
            if candidate[0] < count and (self._suspend is None or not self._suspend.may_be_asleep(candidate[0], count))
        ]
        errors = await asyncio.gather(*map(self._identify, listed))
        found = Counter(gpu.identity.name for uuid, gpu in self._gpus.items() if uuid not in before)
        if found:
            self._evict_gone(count + MAX_GONE_GPUS)
            for name, number in found.items():
                log.info("found GPUs %s", format_fields(count=number, name=name))
        failed = [(*candidate, error) for candidate, error in zip(listed, errors, strict=True) if error]
        addresses = self._pci_addresses(count) if failed else []
        for index, gpu, error in failed:
            name = HUNG if isinstance(error, TimeoutError) else error_name(error)
            self._errors[name] += 1
            down = gpu.collect_unidentified(provisional_identity(index, addresses), name, str(error))
            # The health of a GPU that the daemon may not open is unknown; one known before is shown by its UUID.
            if code_of(error) != NO_PERMISSION and not any(map(down.identity.has_same_place, self._identities)):
                self._provisional[index] = down

    @property
    def _identities(self) -> list[GpuIdentity]:
        return [gpu.identity for gpu in self._gpus.values()]

    def _pci_addresses(self, count: int) -> list[str]:
        """Return the PCI addresses of the GPUs by index, from the kernel; empty where they do not match NVML's GPUs."""
        addresses = list_kernel_gpus()
        listed = [gpu.identity for gpu in self._gpus.values() if not gpu.is_down]
        matched = all(addresses[who.index : who.index + 1] == [who.pci_bus_id] for who in listed)
        return addresses if len(addresses) == count and matched else []

    def _evict_gone(self, limit: int) -> None:
        """Drop the GPUs that are down for longest, except those with a call in progress, which occupies a thread."""
        gone = [gpu for gpu in self._gpus.values() if gpu.is_down and not gpu.current_call]
        gone.sort(key=lambda gpu: gpu.last_success or 0.0)
        for gpu in gone[: max(0, len(self._gpus) - limit)]:
            self._threads.submit(gpu.release)
            del self._gpus[gpu.identity.uuid]

    def _new_gpu(self, index: int) -> PolledGpu:
        plan = replace(self._plan, phase=index // _SLOW_GROUP_GPUS % self._slots / self._slots)

        def new_reader(handle: Handle, uuid: str) -> GpuReader:
            wall, cgroups = self._wall, lambda: self.cgroups
            return GpuReader(
                self._nvml, handle, plan, self._host_memory, self._clock, wall=wall, cgroups=cgroups, uuid=uuid
            )

        return PolledGpu(self._nvml, index, self._threads, new_reader, self._wall)

    async def _identify(self, candidate: tuple[int, PolledGpu]) -> Exception | None:
        """Identify one GPU; return the error if that fails, which is retried in the next poll."""
        index, gpu = candidate
        try:
            await gpu.identify(self._timeout)
        except Exception as error:  # noqa: BLE001 - the driver's own errors, and a binding that misbehaves
            return error
        del self._unidentified[index]
        known = self._gpus.setdefault(gpu.identity.uuid, gpu)
        known.copy_identity(gpu)
        if known is gpu:
            log.debug("GPU identified %s", format_fields(gpu=gpu.identity.uuid, index=index, name=gpu.identity.name))
        return None
