"""A libnvidia-ml.so.1 of our own, so that tests run the real driver binding on a machine without a GPU."""

from mock_nvml.compiling import CompilerMissingError, build
from mock_nvml.control import MockNvml

__all__ = ["CompilerMissingError", "MockNvml", "build"]
