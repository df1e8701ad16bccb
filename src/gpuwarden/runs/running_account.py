"""The account of one run: it goes on from poll to poll, and is added up when somebody asks, which is seldom."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.protocol import PHASES, Phase
from gpuwarden.runs.share import NO_ACCOUNT, Account, Share, added
from gpuwarden.runs.tally import Tally


class RunningAccount:
    """What a run has had so far, after what was counted `before`; reads as an `Account`. Used by one event loop."""

    def __init__(self, before: Account = NO_ACCOUNT) -> None:
        self.tallies: dict[str, Tally] = {}  # by UUID of a GPU or MIG instance
        self.host_memory_peak: int | None = None
        self.step_seconds = 0.0  # by the last report
        self.up = True
        self._phases: dict[str, float] = {}
        self._kept: dict[str, Share] = {}  # of before, on GPUs not held since
        self.resume(before)

    @property
    def shares(self) -> Mapping[str, Share]:
        """Return its share of each GPU or MIG instance that it has held."""
        return {**self._kept, **{uuid: tally.share for uuid, tally in self.tallies.items()}}

    @property
    def phases(self) -> Mapping[str, float]:
        """Return the seconds that it spent in each phase, as polled."""
        return dict(self._phases)

    def now(self) -> Account:
        """Return what it has had up to now."""
        return Account(self.shares, self.phases, self.host_memory_peak)

    def resume(self, before: Account) -> None:
        """Go on from what was counted, by an earlier daemon or this one, before the run was gone for a while."""
        for uuid, share in before.shares.items():
            tally = self.tallies.get(uuid)
            if tally is not None:
                tally.resume(share)
            else:
                self._kept[uuid] = added(share, self._kept[uuid]) if uuid in self._kept else share
        for phase, seconds in before.phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        peaks = [each for each in (self.host_memory_peak, before.host_memory_peak) if each is not None]
        self.host_memory_peak = max(peaks, default=None)

    def take_over(self, other: RunningAccount) -> None:
        """Be the account that another of the same run was, which nobody keeps any more: what is under way goes on."""
        vars(self).update(vars(other))

    def hold(self, uuid: str, gpu: Gpu, *, whole: bool) -> None:
        """Begin to count what it has of a GPU or MIG instance, from this poll on."""
        share = self._kept.pop(uuid) if uuid in self._kept else Share(gpu.identity.name)
        self.tallies[uuid] = Tally(gpu, whole=whole, share=share)

    def pass_phase(self, phase: Phase, seconds: float) -> None:
        """Count time in a phase."""
        if not self._phases:
            self._phases = dict[str, float].fromkeys(PHASES, 0.0)
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds  # what an earlier daemon has counted may lack it

    def settle(self) -> None:
        """Count all that is known, as nothing more will be: the run has ended, or the daemon does."""
        for tally in self.tallies.values():
            tally.settle()
