"""NVML through nvidia-ml-py: session, calls with a deadline, events."""
