"""Texts of errors that only a log has: of the kernel, containers, batch systems, launchers, and warnings at start."""

from __future__ import annotations

from gpuwarden.errors import compatibility_problems as compatibility
from gpuwarden.errors import device_problems as device
from gpuwarden.errors import memory_problems as memory
from gpuwarden.errors import run_problems as run
from gpuwarden.errors.problems import list_patterns

_SHELL = r"^(zsh: |(\S+: line \d+: +)?(\d+ )?)"  # before a signal's name, as bash and zsh report the end of a command

# train_loss, Loss/total, loss_cls; neither the start value of the best loss nor the scale of mixed precision
_LOSS = r"\b(?<!best )(?<!min )(?!(best|min)_)(\w+_)?loss(?![ _]?scal)(es)?([_/][\w/]*)?"
_NOT_FINITE = r"-?(nan|inf(inity|inite)?)"

# Lines that look like errors and are none: of every start, hints, and dumps that follow an error.
NOISE = (
    r"Unable to register cu(FFT|DNN|BLAS) factory",  # TensorFlow, at each start
    r"TF-TRT Warning|libnvinfer|TensorRT",
    r"computation.placer already registered|successful NUMA node read|Could not identify NUMA node",
    r"If the cause is memory fragmentation|_threshold_bytes",  # TensorFlow's allocator
    r"Ignore above cudart dlerror|All log messages before absl::InitializeLog",
    r"ptxas (warning|info)|Loaded cuDNN version|Rebuild TensorFlow with|not compiled to use: ",
    r"Use `?tf\.|\bdeprecated|DeprecationWarning|FutureWarning",
    r"to disable these checks|Your CPU supports instructions",
    r"CellExecutionError: An error occurred while executing",  # nbclient; the error of the cell follows
)

LOG_PATTERNS = (
    *list_patterns(
        memory.MEMORY_WAS_SHORT,
        r"not a failure, but (this )?may mean",  # TensorFlow's allocator
    ),
    *list_patterns(
        memory.KILLED_BY_KERNEL,
        r"(Out of memory|oom-kill|cgroup out of memory).{0,20}: Kill(ed)? process|oom-kill:constraint|invoked oom-killer",  # Linux
        r"Detected \d+ oom.kill event|: task \d[\d,\[\]-]*: Out Of Memory",  # Slurm
        r"\bOOMKilled\b|\boom_killed\b|by the kernel's OOM killer",  # Kubernetes, gpuwarden
    ),
    *list_patterns(device.GPU_FAULT, r"RmInitAdapter failed|rm_init_adapter failed"),
    *list_patterns(
        device.NVLINK_ERROR,
        r"\bSXid \(",  # Linux, of an NVSwitch
    ),
    *list_patterns(
        device.FABRIC_NOT_READY,
        r"fabric ?manager.{0,80}(fail|don't match|does not match|mismatch|error)",
        r"NVSwitch device information .{0,40}failed",
    ),
    *list_patterns(
        device.DRIVER_HANGS,
        # Linux: a task that waits in the driver; GSP is the GPU's firmware
        r"task (nvidia|nv_|irq/\d+-nvidia|UVM|cuda|X)\S*:\d+ blocked for more than \d+ seconds",
        r"\bos_(cond_)?acquire_\w+\+0x\S+ \[nvidia|NVRM: (?!Xid).{0,60}(GSP|RPC).{0,60}(time ?out|timed out|failed|fault|crash)",
        r"NVRM: (?!Xid).{0,80}(time ?out|timed out|heartbeat)",
        r"\bERR!.{1,60}\bERR!",  # nvidia-smi; a single one passes
    ),
    *list_patterns(
        compatibility.DRIVER_LIBRARY_MISMATCH,
        r"NVRM: API mismatch",  # Linux
        r"nvml error: driver/library version mismatch",  # a container
    ),
    *list_patterns(
        compatibility.DRIVER_TOO_OLD,
        r"unsatisfied condition: (cuda|driver)",  # a container
        r"possibly insufficient driver version",  # TensorFlow
    ),
    *list_patterns(
        device.DEVICE_PERMISSION,
        r"Failed to initialize NVML: (Unknown Error|Insufficient Permissions)|nvml error: insufficient permissions",
        r"/dev/nvidia\S*.{0,30}(Permission denied|Operation not permitted)",
    ),
    *list_patterns(
        device.CONTAINER_RUNTIME,
        r"could not select device driver|nvidia-container-(cli|runtime)|CDI device",
        r"unknown (or invalid )?runtime (name: |specified:? )nvidia|Auto-detected mode as|libnvidia-container",
    ),
    *list_patterns(
        device.DRIVER_NOT_LOADED,
        r"NVIDIA-SMI has failed because|Failed to initialize NVML: Driver Not Loaded|libnvidia-ml\.so\.\d: cannot open",
        r"libcuda\.so(\.\d)?.{0,60}cannot open|Could not load dynamic library 'libcuda\.so",
        r"Module nvidia not found|could not insert '?nvidia|NVRM: No NVIDIA (GPU|graphics adapter)|such as:? nouveau",
        r"kernel driver does not appear to be running|NVML Shared Library Not Found",
    ),
    *list_patterns(
        device.NO_DEVICE_VISIBLE,
        r"Could not find cuda drivers on your machine|No devices were found",  # TensorFlow, nvidia-smi
    ),
    *list_patterns(
        memory.SHARED_MEMORY_FULL,
        r"(exit|return) ?code *[:=] *-7\b",  # a launcher, of a rank: ranks share memory (NCCL, loaders)
    ),
    *list_patterns(
        memory.HOST_OUT_OF_MEMORY,
        r"Allocation of \d+ exceeds \d+% of (free )?system memory",  # TensorFlow
        r"low on resource: memory",  # Kubernetes
    ),
    *list_patterns(
        device.CPU_ONLY_BUILD,
        r"compiled without (GPU|CUDA) support|not compiled with (GPU|CUDA)|Torch not compiled with CUDA",
    ),
    *list_patterns(
        run.RETRACING,  # before the program's shapes, which it mentions
        r"triggered tf\.function retracing",  # TensorFlow
        r"_dynamo hit .{0,30}(cache_size_limit|recompile_limit)",  # torch
    ),
)

# Mostly consequences: they come after all others.
DEATH_PATTERNS = (
    *list_patterns(
        run.TIME_LIMIT,
        r"DUE TO TIME LIMIT|exceeded (wall ?time|time limit)|walltime .{0,40}exceeded|TERM_RUNLIMIT",  # Slurm, PBS
    ),
    *list_patterns(
        run.BUS_ERROR,
        _SHELL + r"Bus error|Fatal Python error: Bus|SIGBUS|: task .{1,40}: Bus error",
    ),
    *list_patterns(
        run.SEGMENTATION_FAULT,
        r"Segmentation fault|SIGSEGV|segfault at|exit ?code *: *-11\b|exit code 139\b",
        r"general protection fault|trap invalid opcode|access violation|0xC0000005",
        _SHELL + r"(Illegal (hardware )?instruction|Floating point exception)\b",
        r"ended by SIG(FPE|ILL|SYS|TRAP)|Fatal Python error: (Floating|Illegal)",
    ),
    *list_patterns(
        run.PROCESS_KILLED,
        _SHELL + r"(Killed\b|Terminated( {2}|$))",
        r"Process \d+ got signal: \d+|exit ?code *: *-9\b|exit (code|status) 137\b|SIGKILL"
        r"|ended by SIG(TERM|HUP|QUIT|USR[12]|ALRM|PIPE|XCPU|XFSZ)",
        r"\[\d+\]\s+\d+ killed\b|^已杀死|return code = -9\b|signal 9\b",
        r"task \d[\d,\[\]-]*: Killed",
        r"(STEP|JOB) \S+ ON .{1,80} CANCELLED",
    ),
    *list_patterns(
        run.PROCESS_ABORTED,
        r"double free or corruption|free\(\): invalid|malloc\(\): |corrupted size vs|stack smashing detected",  # glibc
        _SHELL + r"Aborted\b|^zsh: abort\b|Fatal Python error: Aborted",
        r"SIGABRT|exit ?code *: *-6\b|exit code 134\b|terminate called|Check failed: ",
    ),
    *list_patterns(
        run.NOTEBOOK_KERNEL_DIED,
        r"kernel (appears to have|has|unexpectedly) died|Kernel (crashed while executing|died with exit code|Restarting$)",  # Jupyter, VS Code
        r"\b(session|runtime) crashed\b",  # Colab
        r"KernelRestarter: restarting kernel|DeadKernelError",
    ),
    *list_patterns(
        run.RANK_FAILED,
        r"ChildFailedError|ProcessExitedException|-- Process \d+ terminated with|exit ?code *: *\d+\)? local_rank",
        r"Sending process \d+ closing signal|srun: error: .{1,80}: task .{1,40}: Exited with exit code",
        r"return code = [1-9]|Killing subprocess|returned non-zero exit status|RayTaskError|See root cause above",
        r"mpirun (noticed|detected)|MPI_ABORT was invoked|Primary job +terminated",
        r"JAX distributed service detected fatal errors|remote task has failed, got preempted",  # JAX
    ),
    *list_patterns(
        run.NAN_LOSS,
        rf"{_LOSS}['\"]?\s*([:=]|\b(is|was|became)( now)?\b)\s*['\"]?[(\[]?(tensor\()?{_NOT_FINITE}\b",
        rf"{_LOSS}\s+{_NOT_FINITE}(?=\s*[,;|)\]]|\s*$|\s+[\w/]+\s*[:= ]\s*({_NOT_FINITE}\b|-?\d))",  # loss nan lr 0.1
        r"\b(nan|inf(inite)?) (loss|gradients?)|nan detected|non-finite loss|Invalid loss, terminating training",
    ),
    *list_patterns(run.HANG, r"DEADLINE_EXCEEDED|heartbeat timeout|blocked for more than \d+ seconds"),
)
