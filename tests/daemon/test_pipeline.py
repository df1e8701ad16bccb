"""Pipeline of a poll: its result does not change later, and its stages drop runs that are gone."""

from __future__ import annotations

import asyncio

from gpuwarden.config.loader import load
from gpuwarden.daemon.pipeline import Pipeline
from gpuwarden.daemon.sources import open_source
from gpuwarden.state import Counts

POLLS = 5


def test_state_of_a_poll_stays_as_it_was() -> None:
    """Later polls do not change the state of an earlier one."""
    config = load(None, {"source": "simulated"})
    pipeline = Pipeline(config, open_source(config.source, config.simulation))

    async def scenario() -> None:
        for _ in range(POLLS):
            state = await pipeline.poll(Counts())
            before = repr(state)
            await pipeline.poll(Counts())
            assert repr(state) == before
        assert state.runs
        assert state.usage.keys() == {run.peer.run_id for run in state.runs}

    asyncio.run(scenario())


def test_stages_drop_runs_that_are_gone() -> None:
    """A run that the registry has dropped is in no stage's state after the next poll."""
    config = load(None, {"source": "simulated"})
    source = open_source(config.source, config.simulation)
    pipeline = Pipeline(config, source)

    async def scenario() -> None:
        state = await pipeline.poll(Counts())
        gone = state.runs[0].peer.run_id
        pipeline.registry._forget(gone, 0.0)
        state = await pipeline.poll(Counts())
        assert gone not in {run.peer.run_id for run in state.runs}
        assert gone not in pipeline.accountant._tallies
        assert gone not in pipeline.advisor._states
        assert gone not in {run_id for run_id, _uuid in pipeline.pressure._memory}
        assert gone not in state.usage

    asyncio.run(scenario())
