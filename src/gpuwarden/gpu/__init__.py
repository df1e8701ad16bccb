"""GPUs polled through NVML: readers, memory sampling, and the snapshot of each poll."""
