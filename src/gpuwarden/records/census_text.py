"""Census of a run's tensors in words: who keeps how much of its memory."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.formatting import format_ratio
from gpuwarden.records.record_parts import RecordedCensus, RecordedTensors

MAX_HOLDERS = 4  # groups of tensors that are shown; --json has all
MIN_HOLDER_RATIO = 0.02  # of the memory, for a group to be shown
MAIN_HOLDER_RATIO = 0.5  # of the memory, from which what one name keeps is the cause of an out-of-memory


def find_main_holder(census: RecordedCensus) -> str | None:
    """Return a sentence that names what keeps most of the memory; None if no name does."""
    total = _compute_bytes_in_use(census)
    main = next((each for each in census.groups if each.holder), None)
    if main is None or main.size_bytes < MAIN_HOLDER_RATIO * total:
        return None
    return f"Of its memory, {format_ratio(main.size_bytes / total)} {_describe_tensors(main)}."


def list_holders(census: RecordedCensus) -> Iterator[str]:
    """Yield a sentence for each large group, then one for the memory that no tensor explains.

    Ratios are of the allocators' bytes in use. Tensors can have more than that: TensorFlow's may share a buffer.
    """
    total = _compute_bytes_in_use(census)
    if not total:
        return
    large = [each for each in census.groups if each.size_bytes >= MIN_HOLDER_RATIO * total]
    for each in large[:MAX_HOLDERS]:
        yield f"{format_ratio(each.size_bytes / total)} {_describe_tensors(each)}"
    rest = total - sum(each.size_bytes for each in large[:MAX_HOLDERS])
    unseen = total - census.tensor_bytes
    if (other := rest - unseen) >= MIN_HOLDER_RATIO * total:
        yield f"{format_ratio(other / total)} are other tensors"
    if unseen >= MIN_HOLDER_RATIO * total:
        yield f"{format_ratio(unseen / total)} are not in Python's objects"
    if census.cut:
        yield "the census was cut by its time limit: tensors or their holders are missing"


def _describe_tensors(tensors: RecordedTensors) -> str:
    shape = "of several shapes" if tensors.shape is None else f"{tensors.dtype or ''}[{tensors.shape}]"
    words = ["is 1 tensor" if tensors.count == 1 else f"are {tensors.count:,} tensors", shape]
    if tensors.holder:
        words.append(f"kept by {tensors.holder}")
    if tensors.place:
        words.append(f"in {tensors.place}")
    return " ".join(words)


def _compute_bytes_in_use(census: RecordedCensus) -> int:
    return max(census.in_use_bytes or 0, census.tensor_bytes)
