"""Text of a census in the reports of runs and incidents: which tensors have the memory, and which name keeps them."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.formatting import format_ratio
from gpuwarden.records.record_parts import RecordedCensus, RecordedTensors

MAX_GROUPS = 4  # shown; --json has all
MIN_RATIO = 0.02  # of the memory, for a group to be shown


def list_holders(census: RecordedCensus) -> Iterator[str]:
    """Yield a sentence for each large group, then one for the memory that no tensor explains.

    Ratios are of the allocators' bytes in use. Tensors can have more than that: TensorFlow's may share a buffer.
    """
    total = max(census.in_use_bytes or 0, census.tensor_bytes)
    if not total:
        return
    large = [each for each in census.groups if each.size_bytes >= MIN_RATIO * total]
    for each in large[:MAX_GROUPS]:
        yield f"{format_ratio(each.size_bytes / total)} {_describe(each)}"
    rest = total - sum(each.size_bytes for each in large[:MAX_GROUPS])
    unseen = total - census.tensor_bytes
    if (other := rest - unseen) >= MIN_RATIO * total:
        yield f"{format_ratio(other / total)} are other tensors"
    if unseen >= MIN_RATIO * total:
        yield f"{format_ratio(unseen / total)} are not in Python's objects"
    if census.cut:
        yield "the census was cut by its time limit: tensors or their holders are missing"


def _describe(tensors: RecordedTensors) -> str:
    shape = "of several shapes" if tensors.shape is None else f"{tensors.dtype or ''}[{tensors.shape}]"
    words = ["is 1 tensor" if tensors.count == 1 else f"are {tensors.count:,} tensors", shape]
    if tensors.holder:
        words.append(f"kept by {tensors.holder}")
    if tensors.place:
        words.append(f"in {tensors.place}")
    return " ".join(words)
