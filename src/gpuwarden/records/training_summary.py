"""Summary of a run for the terminal of its user, at the end of a fit or a watched loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpuwarden.analysis.findings import NO_GPU_GUIDES, nonfinite_loss_text
from gpuwarden.formatting import format_bytes, format_elapsed, format_growth, format_ratio
from gpuwarden.gpu.clock_reasons import clock_reason_text
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import MAX_ADVICE_CHARACTERS, Reply, Summary
from gpuwarden.protocol.validators import clip
from gpuwarden.records.record import RecordedDevice, RunRecord
from gpuwarden.records.record_parts import RecordedBatchSizeAdvice
from gpuwarden.records.run_headline import explain_memory_error
from gpuwarden.runs.run_snapshot import JoinedPoll


class SummarySender:
    """Sender of the summaries that runs request. `send` returns whether a run's connection took a message."""

    def __init__(
        self, outlines: Callable[[Iterable[str]], Iterable[RunRecord]], send: Callable[[ProcessKey, Reply], bool]
    ) -> None:
        self._outlines = outlines
        self._send = send
        self._answered: dict[str, int] = {}  # last `summaries_wanted`, by run id

    def send_summaries(self, poll: JoinedPoll) -> None:
        """Send a summary to each run that has requested one since the last poll. Does not block."""
        wanted = {run.peer.run_id: run.report.summaries_wanted for run in poll.runs if run.up and run.report}
        asking = [run for run in poll.runs if wanted.get(run.peer.run_id, 0) > self._answered.get(run.peer.run_id, 0)]
        self._answered = wanted
        if not asking:
            return
        gpus = {gpu.identity.uuid: str(gpu.identity.index) for gpu in poll.snapshot.gpus}
        records = {record.run_id: record for record in self._outlines(run.peer.run_id for run in asking)}
        for run in asking:
            lines = summarize_training(records[run.peer.run_id], gpus)
            self._send(run.peer, Summary(wanted[run.peer.run_id], tuple(clip(s, MAX_ADVICE_CHARACTERS) for s in lines)))


def summarize_training(record: RunRecord, gpus: Mapping[str, str]) -> Iterator[str]:
    """Yield the diagnosis and the next step if the last step ran out of memory, else one line of figures.

    `gpus` has the numbers of GPUs by UUID.
    """
    error = record.reported_errors[-1] if record.reported_errors else None
    if error is not None and error.steps == record.steps and (headline := explain_memory_error(record, error)):
        yield headline.text
        yield from headline.reasons
        yield f"next step: {headline.next_step}"
        return
    if figures := "; ".join(_list_figures(record, gpus)):
        yield f"{record.name}: {figures}"


def _list_figures(record: RunRecord, gpus: Mapping[str, str]) -> Iterator[str]:
    for device in record.devices:
        yield _describe_memory(device, f"GPU {gpus[device.uuid]}" if device.uuid in gpus else device.name)
    if record.no_gpu:
        yield f"no GPU used: {NO_GPU_GUIDES[record.no_gpu].meaning}"
    if record.nonfinite_loss:
        yield f"loss {nonfinite_loss_text(record.nonfinite_loss.reported)}"
    if record.batch_size_advice is not None:
        yield from _describe_batch(record.batch_size_advice)
    if record.input_wait_ratio is not None:
        yield f"waited for input {format_ratio(record.input_wait_ratio)} of step time"
    if record.throttled_seconds:  # else no GPU of the run counts it
        # Several reasons may apply at once, so they do not add up.
        reason, seconds = max(record.throttled_seconds.items(), key=lambda entry: entry[1])
        yield f"throttled {format_elapsed(seconds)} ({clock_reason_text(reason)})" if seconds else "not throttled"


def _describe_batch(advice: RecordedBatchSizeAdvice) -> Iterator[str]:
    if advice.too_large:
        yield f"batch size {advice.batch_size} is too large, {advice.advised} should fit"
    elif advice.advised > advice.batch_size:
        yield f"batch size {advice.advised} should fit"


def _describe_memory(device: RecordedDevice, name: str) -> str:
    peak, headroom, growth = device.highest_peak_bytes, device.min_headroom_bytes, device.memory_growth_bytes_per_second
    words = [
        f"{name} peak {format_bytes(peak)}" if peak is not None else name,
        f"headroom at least {format_bytes(headroom)}" if headroom is not None else None,
        f"leak of {format_growth(growth)}" if growth is not None else None,
    ]
    return ", ".join(filter(None, words))
