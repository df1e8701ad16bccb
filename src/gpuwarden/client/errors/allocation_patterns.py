"""Patterns that parse a failed allocation out of an error text; tests/error_messages has the texts."""

from __future__ import annotations

# Named groups: `size` and `unit`, or `bytes` where it is exact, `shape`, `dtype`, `device` or `gpu`, `allocator`, `op`.
# All matches of the first pattern that matches are used: several replicas may have failed.
_SIZE = r"(?P<size>[\d.,]+) ?(?P<unit>bytes|[KMGTP]?i?B|[KMGTP])\b"
ALLOCATIONS = (
    r"OOM when allocating (?:temporary )?tensor (?:with shape|of shape) ?\[(?P<shape>[\d,]*)\](?: and type (?P<dtype>\w+))?(?: on (?P<device>\S+))?(?: by allocator (?P<allocator>\w+))?",
    r"from \S+ to (?P<device>\S*device:\S+) in order to run (?P<op>\w+): Dst tensor is not initialized",
    rf"(?<!you )Tried to allocate {_SIZE}(?:\. GPU (?P<gpu>\d+)| \((?:GPU (?P<gpu_too>\d+)))?",
    rf"Failed to allocate request for {_SIZE} \((?P<bytes>\d+)B\) on device ordinal (?P<gpu>\d+)",
    rf"Out of memory (?:while )?(?:trying to allocate|allocating) {_SIZE}",
    rf"Unable to allocate {_SIZE} for an array with shape \((?P<shape>[\d, ]*)\) and data type (?P<dtype>\w+)",
    rf"(?:(?P<allocator>\w+): .{{1,60}})?you tried to allocate {_SIZE}",
    rf"Allocation on device (?P<gpu>\d+) would exceed(?s:.*?)Requested +: {_SIZE}",
    rf"fail(?:ed)? to (?:CUDA )?(?:host )?[mc]?alloc(?:ate)?(?: async)? {_SIZE}(?: \((?P<bytes>\d+) bytes\))?",
    rf"(?:Attempting to (?:reserve|allocate)|unable to mmap|pinned host memory of size:) {_SIZE}",
    r"Allocation \(size=(?P<bytes>\d+)\) would exceed memory",
)
