"""A libnvidia-ml.so.1 of our own, so that tests run the real driver binding on a machine without a GPU."""

from mock_nvml.control import MockNvml
from mock_nvml.library import CompilerMissingError, build

__all__ = ["CompilerMissingError", "MockNvml", "build"]
