"""Problems of a run as a whole: collectives, hangs, death of a process."""

from __future__ import annotations

from gpuwarden.errors.problems import ANY, FRAMEWORK_REGEXES, Cause, Problem, Step

COLLECTIVE_FAILED = Problem(
    "collective_failed",
    "other",
    "collective operation between GPUs or machines failed (NCCL)",
    (
        Cause("Another rank failed first: its own error is the cause."),
        Cause("The ranks cannot reach each other: wrong network interface, firewall, or two ranks on one GPU."),
        Cause("Shared memory is full, or peer access between the GPUs does not work.", ("input.shm",)),
    ),
    "Read the log of the rank that failed first, and run once with NCCL_DEBUG=INFO.",
    (ANY,),
    (
        Step(
            r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device (?P<gpu>\w+)",
            "Give ranks {one} and {other} a GPU each (both use that of PCI bus {gpu}): "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), with one rank for each GPU.",
        ),
        Step(
            r"EADDRINUSE|Address already in use",
            "End the earlier run that still has the port, or choose another one (MASTER_PORT).",
        ),
        Step(r"NCCL WARN", "Read the log of the rank that failed first: its first line with NCCL WARN says why."),
    ),
)
COLLECTIVE_TIMEOUT = Problem(
    "collective_timeout",
    "other",
    "collective operation timed out",
    (
        Cause("Another rank failed, or is still busy: a longer batch, a checkpoint, a validation."),
        Cause("The ranks call collectives in different orders or numbers."),
        Cause("A link between GPUs or machines hangs.", ("gpu.xids",)),
    ),
    "Find the rank that did not arrive: its log ends first, or `py-spy dump --pid PID` shows where it waits.",
    (ANY,),
)
HANG = Problem(
    "hang",
    "other",
    "timeout: the program made no progress",
    (
        Cause("A peer, a file system or a service does not answer."),
        Cause("Processes wait for each other."),
    ),
    "Show where it waits with `py-spy dump --pid PID`.",
    (ANY,),
)
TIME_LIMIT = Problem(
    "time_limit",
    "other",
    "batch job ended by its time limit",
    (Cause("The job ran longer than the time it requested."),),
    "Request more time, or save checkpoints and resume.",
)
PROCESS_KILLED = Problem(
    "process_killed",
    "other",
    "process killed by a signal",
    (
        Cause("The kernel killed it for host memory.", ("memory.host",)),
        Cause("The batch system, the container runtime or a person stopped it."),
        Cause("The launcher stopped it after another process failed."),
    ),
    "Find who stopped it: batch system, container runtime, launcher or a person. After SIGKILL, also look for "
    "`oom-kill` in `journalctl -k` at that time.",
    (ANY,),
)
SEGMENTATION_FAULT = Problem(
    "segmentation_fault",
    "other",
    "crash in native code (segmentation fault)",
    (
        Cause("A native library does not fit the framework, the driver or the CPU.", ("framework.packages",)),
        Cause("A custom operation or a library has a bug."),
    ),
    "Find the Python line of the crash (`python -X faulthandler train.py` prints it), then update or reinstall the "
    "library that it calls.",
    (
        *("driver_library_mismatch", "driver_too_old", "cudnn_mismatch", "cuda_mismatch", "package_mismatch"),
        *("library_init_failed", "illegal_address", "gpu_lost", "ecc_error", "gpu_fault", "shared_memory_full"),
        *("host_out_of_memory", "library_not_found"),
    ),
    (Step(r"Fatal Python error", "Update or reinstall the library that the innermost Python line calls."),),
)
BUS_ERROR = Problem(
    "bus_error",
    "other",
    "access to mapped memory that nothing backs (bus error)",
    (
        Cause("Shared memory (/dev/shm) is full: a container has 64 MiB by default.", ("input.shm",)),
        Cause("A file that is mapped into memory, such as an array of numpy.memmap, became shorter or fills its disk."),
        Cause("A network file system or a disk failed below a mapped file."),
    ),
    "Watch `df -h /dev/shm` and the disk of mapped files while the program runs. A container gets more shared memory "
    "with `--shm-size=8g` or `--ipc=host`.",
    ("shared_memory_full", "disk_full", "gpu_lost"),
)
LOADER_WORKER_DIED = Problem(
    "loader_worker_died",
    "other",
    "data loader worker ended without a message",
    (
        Cause("Shared memory is full: a container has 64 MiB by default.", ("input.shm",)),
        Cause("The kernel killed the worker for host memory.", ("memory.host",)),
        Cause("The worker crashed in native code, or could not import the program's main module."),
    ),
    "Run once with num_workers=0, so that the worker's own error is shown.",
    (
        *("shared_memory_full", "killed_by_kernel", "input_out_of_memory", "host_out_of_memory"),
        *("segmentation_fault", "bus_error"),
    ),
)
PROCESS_ABORTED = Problem(
    "process_aborted",
    "other",
    "process aborted itself",
    (
        Cause("A check in native code failed; the lines before say which."),
        Cause("A CUDA error that the framework cannot raise as an exception."),
    ),
    "Read the last lines that the process wrote before it aborted: they have the check that failed.",
    (ANY,),
)
RANK_FAILED = Problem(
    "rank_failed",
    "other",
    "a process of the job failed",
    (Cause("The process failed with its own error, in its own log."),),
    "Read the log of the process that the launcher names as the first failure.",
    (ANY,),
)
NOTEBOOK_KERNEL_DIED = Problem(
    "notebook_kernel_died",
    "other",
    "process behind the notebook ended without a message",
    (
        Cause("The kernel of the system killed it for host memory.", ("memory.host",)),
        Cause(
            "A native library crashed: it does not fit the framework, the driver or the GPU.",
            ("driver.versions", "framework.packages", "framework.libraries"),
        ),
        Cause("The GPU failed, or a check in the framework's native code.", ("gpu.xids",)),
    ),
    "Save the notebook as a script and start it with `gpuwarden run -- python script.py`: the messages before the end, "
    "the signal and the reason are shown there.",
    (ANY,),
)
RETRACING = Problem(
    "retracing",
    "other",
    "function traced and compiled again and again (retracing)",
    (
        Cause("The shape of its tensors varies from call to call: sequence lengths, or a smaller last batch."),
        Cause("Its arguments are Python numbers or objects, and each new value is traced again."),
        Cause("A loop defines the function or builds the model at each pass."),
    ),
    "Call it with tensors of one shape (drop_remainder=True, padding) or with @tf.function(reduce_retracing=True), and "
    "define it outside of the loop.",
    steps=(
        Step(
            FRAMEWORK_REGEXES["torch"],
            "Call it with tensors of one shape (padding, drop_last=True), or compile it with dynamic=True.",
        ),
    ),
)
NAN_LOSS = Problem(
    "nan_loss",
    "other",
    "loss is NaN or infinite",
    (
        Cause("The learning rate is too high, or float16 overflows without loss scaling."),
        Cause("The data has NaN or infinite values, or labels out of range."),
        Cause("A division by zero or the logarithm of zero in the model or loss."),
        Cause("The GPU computes wrong results.", ("gpu.ecc",)),
    ),
    "Restart from a checkpoint before that step, and check the data of that step for values that are not finite.",
    ("ecc_error",),
)
