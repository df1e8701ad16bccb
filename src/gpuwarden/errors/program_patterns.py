"""Texts of errors of the program, its data and its processes, which come after all others."""

from __future__ import annotations

from gpuwarden.errors import device_problems as device
from gpuwarden.errors import program_problems as program
from gpuwarden.errors import run_problems as run
from gpuwarden.errors.problems import list_patterns

PROGRAM_PATTERNS = (
    # Wrong shapes or types in the program.
    *list_patterns(
        program.CHECKPOINT_MISMATCH,
        r"in loading state_dict",  # torch: the checkpoint of another model
        r"saved weight with shape|Unable to open object|Can't open attribute|objects could not be loaded|variables during loading",  # Keras
        r"not found in checkpoint|weight file containing|Layer count mismatch|when loading weights",  # TensorFlow, Keras
    ),
    *list_patterns(
        program.DTYPE_MISMATCH,
        # TensorFlow, torch, JAX
        r"was expected to be an? \w+ tensor but|expected scalar type",
        r"Found dtype|not implemented for '|can't be cast",
        r"Input type .{1,80} and (weight|bias) type",
        r"expected .{1,60} to have (the same )?dtype",
        r"equal (data ?types|dtypes|types)|same dtype",
        r"Expected \w+, (but )?got .{1,80} of type '",
        r"scalar types?\b|expected dtype|cannot be converted to type|must have the same (dtype|type)\b",
        # TensorFlow, Keras
        r"Tensor conversion requested dtype|Cast \w+ to \w+ is not supported",
        r"(has|have) (type|dtype|DataType) \S+ (that does not|not in)",
        r"Unsupported object type|Unsupported numpy type",
        r"(Unrecognized|Invalid|incompatible|inconsistent|mismatched|unsupported) (data )?d?type",
        r"(element|d)type mismatch",
        r"Cannot convert .{1,80} to (EagerTensor of dtype|a? ?Tensor)",
        r"Failed to convert a NumPy array",
    ),
    *list_patterns(
        program.SHAPE_MISMATCH,
        # all
        r"incompatible shapes?",
        r"shapes?.{0,120}(incompatible|mismatch|must match|not aligned|do(es)? not match|must be equal|must have the same|cannot be broadcast)",
        r"(incompatible|mismatch(ed|ing)?) .{0,60}shapes?|shape mismatch",
        # TensorFlow, Keras
        r"Matrix size-incompatible|logits and labels must",
        r"Dimensions? .{0,60}(must be equal|should match|must match|not compatible|out of range|evenly divisible)",
        r"dimension size|must have the same (rank|shape|number of)",
        # Keras
        r"Error when checking .{1,80}: expected|passing a target array of shape",  # Keras 2
        r"incompatible with the layer|Negative dimension size|must have rank \(ndim\)",
        r"shape with unknown rank|an unknown TensorShape",  # a rank that differs from an earlier fit's
        r"expects \d+ (named )?input|Missing data for input|requires inputs with matching shapes",
        r"total size of the tensor must be unchanged|`input_shape` with at least|have different structures",
        r"encountered when calling \w+\.call\(\)(?s:.*)tuple index out of range",
        r"Computed output size would be (zero or )?negative|cardinality is ambiguous|must be rank",
        r"expected (min_)?ndim",
        # TensorFlow, NumPy, JAX
        r"reshape .{0,80}(tensor|array|shape|size)|Input to reshape",
        r"Cannot batch tensors|Can ?not squeeze|must be \d-dimensional|expects a vector of size",
        r"Invalid reduction dimension|out of range using input dim",
        r"number of elements does not match",
        r"tensors? with different shapes",
        # torch
        r"cannot be multiplied|size mismatch|sizes of tensors must match|size of tensor a",
        r"is invalid for input of size|to be equal size|expanded size|same size",
        r"Expected \d-?D|Expected .{0,40}batch_size|expected input.{0,60}channels",
        r"Kernel size can't be greater",
        r"Using a target size|Given groups=\d+, weight|Dimension out of range|Target size .{1,80} input size",
        # NumPy, JAX
        r"could not be broadcast|cannot broadcast|inhomogeneous shape",
        r"mismatch in its core dimension",
        r"requires .{0,60}(dimension|shape)s? .{0,60}(equal|match|same|compatible)",
    ),
)

# All of the kind "other", which the training process does not look for.
OTHER_PATTERNS = (
    *list_patterns(
        run.COLLECTIVE_TIMEOUT,
        r"Watchdog caught collective operation timeout|collective operation timeout",  # torch, of NCCL
        r"socket has timed out|RendezvousTimeoutError|Missing ranks|timed out waiting for clients",  # torch, Horovod
        r"Barrier timed out|join the rendezvous, but not all",  # JAX
        r"submitted to be reduced, gathered or broadcasted",  # Horovod
        r"Timed out (initializing process group|after \d+ seconds waiting)",  # torch
    ),
    *list_patterns(
        run.COLLECTIVE_FAILED,
        r"NCCL (error|communicator was aborted|failure|operation .{0,60}failed)|NCCL WARN .{0,60}(fail|error|timeout)",
        r"Duplicate GPU detected|failed to pass monitoredBarrier",
        r"DistBackendError|DistNetworkError|Connection closed by (remote )?peer",
        r"(gloo|c10d).{0,200}(closed|failed|timed out|reset by peer|broken pipe)",  # torch
        r"what\(\): +(Transport endpoint is not connected|Connection reset by peer|Broken pipe)",  # C++, of a lost rank
        r"disagreement between rank|Address already in use|Collective ops is aborted|Horovod has been shut ?down|EADDRINUSE",
        r"WatchTasksAsync failed|UNAVAILABLE: ?failed to connect to all addresses",  # JAX
    ),
    *list_patterns(device.NOT_SUPPORTED_HERE, r"doesn't have valid Grid license|unlicensed vGPU"),
    *list_patterns(
        device.CALL_REFUSED,
        r"invalid resource handle|context is destroyed|driver shutting down",
        r"(CUDA|HIP) (driver |runtime )?error: (?!CU)|CUDA_ERROR_[A-Z]",  # of a later version
    ),
    *list_patterns(
        run.LOADER_WORKER_DIED,
        r"DataLoader worker .{1,30} exited unexpectedly",  # torch
    ),
    *list_patterns(
        run.SEGMENTATION_FAULT,
        r"killed by signal: Segmentation fault",  # torch's loader
    ),
    *list_patterns(
        run.NAN_LOSS,
        r"(inf or nan|is NaN|nan) : Tensor had|CheckNumerics",  # TensorFlow
        r"returned nan values|contains either `inf`|invalid values:(?s:.{0,80})nan|Input contains NaN|invalid value \(nan\)",
        r"Minimum loss scale reached|NaN in summary histogram|loss scale to:? ([01](\.\d+)?|\d+e-\d+)\s*$",
        r"loss scale (already )?at minimum|diverged with loss|FloatingPointError",
    ),
    *list_patterns(
        program.DEVICE_MISMATCH,
        r"tensors to be on the same device|but found at least two devices",  # torch
        r"(expected|must|should) .{0,80}\bthe same device|Expected object of (device|backend)|on device .{1,20} but .{1,60} on device|must be on the same device",
    ),
    *list_patterns(
        program.INDEX_OUT_OF_RANGE,
        # TensorFlow, torch
        r"Received a label value of|is not in \[0, \d+\)|Target -?\d+ is out of bounds|index out of range in self",
        r"index \d+ is out of bounds|indices are out of bounds",
    ),
    *list_patterns(
        program.DISK_FULL,
        r"Error writing .{0,20}checkpoint|Resource exhausted: /",  # TensorFlow
        r"No space left on device|file write failed|Disk quota exceeded|failed with Input/output error",
    ),
    *list_patterns(
        program.PROCESS_LIMIT,
        r"Too many open files|received \d+ items of ancdata|can't start new thread|Resource temporarily unavailable",
    ),
    *list_patterns(
        program.NETWORK_ERROR,
        r"SSLError|CERTIFICATE_VERIFY|Read ?Timeout|Connect ?Timeout|HTTP ?Error|Client Error: |couldn't connect to|Repo(sitory)?NotFoundError|GatedRepo|EntryNotFound",
        r"(requested|local) files? in the (local|disk) cache|outgoing traffic has been disabled|(your|internet) connection\b",
        r"Network is unreachable|Name or service not known|couldn't reach|HTTPSConnectionPool|ProxyError|Max retries exceeded|ConnectionError|URLError|Temporary failure in name resolution",
    ),
    *list_patterns(
        program.MISSING_MODULE,
        r"ModuleNotFoundError|No module named|cannot import name|module '\S+' has no attribute|NameError: ",
        r"but it was not found in your environment|is not installed\b|Please install ",
    ),
    *list_patterns(
        program.BAD_DATA,
        r"cannot identify image|image file is truncated|corrupted record|UnicodeDecodeError|JSONDecodeError",
        r"Invalid JPEG data|Queue .{1,80} is closed and has insufficient elements",  # TensorFlow
        r"inflate\(\) failed|DataLossError|Unknown image file format|Error in user-defined function passed to",
    ),
    *list_patterns(
        program.CHECKPOINT_MISMATCH,
        r"Ran out of input|unexpected EOF|Weights only load failed|Unknown (layer|optimizer|loss function):",
        r"PytorchStreamReader failed|UnpicklingError|SafetensorError|invalid load key|file signature not found",
    ),
    *list_patterns(run.HANG, r"DataLoader timed out|TimeoutError|TimeoutExpired|Deadline Exceeded"),
    *list_patterns(
        program.FILE_NOT_FOUND,
        r"can't open file|(file|path|folder|directory)\b.{0,200}does not exist|NotADirectoryError|Unable to open file",
        r"Stale file handle|Transport endpoint is not connected",
        r"No such file or directory|FileNotFoundError|NotFoundError: |Failed to find any matching files",
    ),
    *list_patterns(program.PERMISSION_DENIED, r"PermissionError|Permission denied|Read-only file system"),
    *list_patterns(program.ASSERTION_FAILED, r"AssertionError"),
)
