"""TensorFlow's allocator of GPUs in place of the CPU's: real out-of-memories, and figures of memory, without a GPU."""

from __future__ import annotations


def memory_limit(mib: int) -> dict[str, str]:
    """Return the environment of a process whose TensorFlow has this much memory; it is read as TensorFlow loads."""
    return {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib),
        "TF_ENABLE_ONEDNN_OPTS": "0",  # with oneDNN an out-of-memory in graph mode ends the process by SIGSEGV
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
