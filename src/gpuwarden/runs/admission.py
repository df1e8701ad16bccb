"""Admission of new runs: how many a user may start and have, and which run makes room for another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from gpuwarden.fairness.fair_eviction import find_user_with_most
from gpuwarden.fairness.rate_limit import RateLimits
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.protocol.codec import ProtocolError
from gpuwarden.runs.run_state import RunState

UsesGpu = Callable[[RunState], bool]


class Admission:
    """Limits on the number of runs: of all, of each user, and of a user's new ones a minute. `now` is monotonic."""

    def __init__(self, limit: int, user_limit: int, new_per_minute: int) -> None:
        self._limit = limit
        self._user_limit = user_limit
        self._new_per_minute = new_per_minute
        self._new_runs = RateLimits(new_per_minute, 60 / new_per_minute)

    def admit(self, newcomer: RunState, runs: Mapping[str, RunState], uses_gpu: UsesGpu, now: float) -> str | None:
        """Return the id of the run that makes room for a new one; None if there is room.

        Raises ProtocolError if the new one is refused.
        """
        user = find_user(newcomer.peer.uid)
        if not self._new_runs.allows(user, now):
            raise ProtocolError(
                "too_many_new_runs", f"limit of {self._new_per_minute} new runs a minute reached (runs.new_per_minute)"
            )
        evicted = self._find_evicted(newcomer, user, runs, uses_gpu, now)
        self._new_runs.consume(user, now)
        return evicted

    def expire(self, now: float) -> None:
        """Drop the rates of users who have started no run for a minute or two."""
        self._new_runs.expire(now)

    def _find_evicted(
        self, newcomer: RunState, user: int, runs: Mapping[str, RunState], uses_gpu: UsesGpu, now: float
    ) -> str | None:
        own = {run_id: each for run_id, each in runs.items() if find_user(each.peer.uid) == user}
        if len(own) >= self._user_limit:
            if run_id := _find_gone(own, now):
                return run_id
            raise ProtocolError(
                "too_many_runs", f"limit of {self._user_limit} runs of a user reached (runs.max_per_user)"
            )
        if len(runs) < self._limit:
            return None
        run_id = _find_gone(runs, now) or _find_displaced(newcomer, runs, uses_gpu)
        if run_id is None:
            raise ProtocolError("too_many_runs", f"limit of {self._limit} runs reached (runs.max)")
        return run_id


def _find_gone(runs: Mapping[str, RunState], now: float) -> str | None:
    """Return the run that ended first, else the one that has been silent for longest past its expiry."""
    ended = [(each.outcome.ended, run_id) for run_id, each in runs.items() if each.outcome.ended is not None]
    silent = [(each.seen_at, run_id) for run_id, each in runs.items() if now - each.seen_at > each.rules.expiry]
    return min(ended or silent)[1] if ended or silent else None


def _find_displaced(newcomer: RunState, runs: Mapping[str, RunState], uses_gpu: UsesGpu) -> str | None:
    """Return the newest run of the user with the most, unless that is the newcomer's user.

    A run that uses a GPU never makes room for one that does not, and is the last to make room for one that does. Not
    the oldest run: a dropped one reconnects, and each time the longest history would be lost.
    """
    without_gpu = {run_id: each for run_id, each in runs.items() if not uses_gpu(each)}
    if uses_gpu(newcomer) and without_gpu:
        user = Counter(find_user(each.peer.uid) for each in without_gpu.values()).most_common(1)[0][0]
        return _find_newest(without_gpu, user)
    candidates = runs if uses_gpu(newcomer) else without_gpu
    user = find_user_with_most((each.peer.uid for each in candidates.values()), newcomer.peer.uid)
    return None if user == find_user(newcomer.peer.uid) else _find_newest(candidates, user)


def _find_newest(runs: Mapping[str, RunState], user: int) -> str:
    return next(run_id for run_id in reversed(list(runs)) if find_user(runs[run_id].peer.uid) == user)
