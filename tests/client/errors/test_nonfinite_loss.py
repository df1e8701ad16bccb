"""Counter of losses that are not finite: its bounds hold, however seldom losses are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.client.errors.nonfinite_loss import NonFiniteLossCounter
from gpuwarden.protocol.messages import NonFiniteLoss

epochs = st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8), min_size=1, max_size=4)


@given(epochs)
def test_mean_of_an_epoch(steps: list[list[tuple[bool, bool]]]) -> None:
    """Read as Keras's sticky mean, at some steps and each epoch's end, the bounds have the truth between them."""
    counter, truth, number = NonFiniteLossCounter(), list[int](), 0
    for epoch in steps:
        is_mean_finite = was_finite = True
        for place, (is_finite, is_read) in enumerate(epoch):
            number += 1
            is_mean_finite &= is_finite
            truth += [] if is_finite else [number]
            if not is_read and place + 1 < len(epoch):
                continue
            if is_mean_finite:
                counter.record_finite(number)
            else:
                counter.record_nonfinite(number, 1.0, is_new=was_finite)
            was_finite = is_mean_finite
    found = counter.summarize(3.0)
    assert found is not None
    assert found.steps <= len(truth) <= found.max_steps
    assert found.steps == sum(any(not finite for finite, _ in epoch) for epoch in steps)
    assert found.current == any(not finite for finite, _ in steps[-1])
    if truth:
        assert found.after < truth[0] <= found.first
        assert found.seconds_ago == 2.0


def test_validation() -> None:
    """A validation is counted for itself; it is current until the next one is finite, whatever training's loss is."""
    counter = NonFiniteLossCounter()
    counter.record_validation(4, 1.0, is_finite=False)
    counter.record_finite(8)
    counter.record_validation(8, 2.0, is_finite=False)
    found = counter.summarize(3.0)
    assert found == NonFiniteLoss(0, 0, 0, 4, seconds_ago=2.0, current=True, validations=2)
    counter.record_nonfinite(12, 4.0)
    counter.record_validation(12, 5.0, is_finite=True)
    counter.record_finite(16)
    found = counter.summarize(5.0)
    assert found == NonFiniteLoss(1, 4, 8, 12, seconds_ago=1.0, current=False, validations=2)


def test_end_of_validation() -> None:
    """A run that validates no longer keeps its counts, and its last validation is not current; training's loss is."""
    counter = NonFiniteLossCounter()
    counter.record_validation(4, 1.0, is_finite=False)
    counter.end_validation()
    found = counter.summarize(3.0)
    assert found == NonFiniteLoss(0, 0, 0, 4, seconds_ago=2.0, current=False, validations=1)
    counter.record_nonfinite(5, 4.0)
    counter.end_validation()
    found = counter.summarize(4.0)
    assert found is not None
    assert found.current


def test_unknown() -> None:
    """Without a loss there is no figure, so that 0 is a measured 0."""
    counter = NonFiniteLossCounter()
    assert counter.summarize(1.0) is None
    counter.record_finite(7)
    found = counter.summarize(1.0)
    assert found is not None
    assert (found.steps, found.max_steps) == (0, 0)
