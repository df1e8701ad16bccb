"""Problems of the program and its data."""

from __future__ import annotations

from gpuwarden.errors.problems import FRAMEWORK_REGEXES, Cause, Problem, Step

_PATH = r"({}):? '?(?P<path>/[^\s'\"]+)"  # of the file in an error of the operating system

SHAPE_MISMATCH = Problem(
    "shape_mismatch",
    "shape_dtype",
    "shapes do not fit together",
    (
        Cause("The data has another shape than the model's input or the labels another than its output."),
        Cause("A layer was given dimensions that do not follow from the layer before."),
    ),
    "Print the shape of one batch, and compare it with model.summary() and the loss.",
)
EMPTY_TENSOR = Problem(
    "empty_tensor",
    "shape_dtype",
    "empty batch, or a dimension of 0",
    (
        Cause("The last batch, or a replica's share of it, has no examples."),
        Cause("The input is smaller than pooling and strides halve it."),
    ),
    "Print the shape of the batch that fails; drop an incomplete last batch (drop_remainder=True, drop_last=True).",
)
DTYPE_MISMATCH = Problem(
    "dtype_mismatch",
    "shape_dtype",
    "types do not fit together",
    (
        Cause("Data, model and loss have different types, e.g. float64 and float32, or integers and floats."),
        Cause("Mixed precision converts one operand and not the other."),
    ),
    "Convert one batch to the type of the model, e.g. tf.cast(x, tf.float32) or x.float().",
    steps=(
        Step(FRAMEWORK_REGEXES["jax"], "Convert one batch to the type of the model, e.g. x.astype(jnp.float32)."),
        Step(FRAMEWORK_REGEXES["torch"], "Convert one batch to the type of the model, e.g. x.float()."),
        Step(
            FRAMEWORK_REGEXES["tensorflow"], "Convert one batch to the type of the model, e.g. tf.cast(x, tf.float32)."
        ),
    ),
)
DEVICE_MISMATCH = Problem(
    "device_mismatch",
    "other",
    "tensors on different devices",
    (Cause("The model or a part of the batch was not moved to the GPU."),),
    "Move the model and each tensor of the batch to one device with .to(device).",
)
CHECKPOINT_MISMATCH = Problem(
    "checkpoint_mismatch",
    "other",
    "checkpoint damaged, or of another model",
    (
        Cause("The model's sizes or layers differ from those that the checkpoint was saved with."),
        Cause("The file is damaged, or of another format."),
    ),
    "Build the model with the configuration of the checkpoint.",
)
INDEX_OUT_OF_RANGE = Problem(
    "index_out_of_range",
    "other",
    "label or index out of range",
    (
        Cause("The data has more classes than the model has outputs, or labels start at 1."),
        Cause("A token number is larger than the embedding."),
    ),
    "Compare the largest and the smallest label or index with the size of the output or embedding.",
)
BAD_DATA = Problem(
    "bad_data",
    "other",
    "input data that cannot be read",
    (Cause("A file is damaged, truncated, or of another format than the program expects."),),
    "Check the file that the message names, or the one read at that step.",
)
FILE_NOT_FOUND = Problem(
    "file_not_found",
    "other",
    "file not found",
    (
        Cause("The path is wrong, or relative to another folder."),
        Cause("The file system is not mounted in the container or on this node."),
    ),
    "Check with `ls` that the path exists where the program runs.",
    steps=(
        Step(_PATH.format("No such file or directory|can't open file"), "Check `ls -l {path}` where the program runs."),
    ),
)
PERMISSION_DENIED = Problem(
    "permission_denied",
    "other",
    "no permission for a file",
    (
        Cause("The user of the program may not read or write the path."),
        Cause("The file system is mounted read-only."),
    ),
    "Check `ls -l` of the path as the user of the program.",
    steps=(
        Step(
            _PATH.format("Permission denied|Read-only file system"), "Check `ls -l {path}` as the user of the program."
        ),
    ),
)
DISK_FULL = Problem(
    "disk_full",
    "other",
    "disk full or quota reached",
    (
        Cause("Checkpoints, logs or caches fill the file system."),
        Cause("The user's quota is used up."),
    ),
    "Check `df -h` and `df -i` of the path, and delete old checkpoints.",
    steps=(
        Step(
            _PATH.format("No space left on device|Disk quota exceeded"),
            "Check `df -h` and `df -i` of {path}, and delete old checkpoints.",
        ),
    ),
)
PROCESS_LIMIT = Problem(
    "process_limit",
    "other",
    "limit of open files, processes or threads reached",
    (
        Cause("Many loader workers share tensors through files: more than the limit of open files allows."),
        Cause("The limit of processes of the user, the container or the job is reached."),
    ),
    "Compare `ulimit -n` and `ulimit -u` with what the program needs, raise them, or use fewer loader workers.",
)
MISSING_MODULE = Problem(
    "missing_module",
    "other",
    "Python module or name missing",
    (
        Cause("The package is not installed in the environment that runs the program."),
        Cause("A file of one's own has the name of the package.", ("python.shadows",)),
        Cause("The installed version does not have that name."),
    ),
    "Install the package with the Python that runs the program: `python -m pip install NAME`.",
    steps=(
        Step(
            r"No module named '?(?P<name>[A-Za-z]\w*)",
            "Install the package of {name} with the Python that runs the program: `python -m pip install {name}`, if "
            "that is its name.",
        ),
        Step(
            r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
            "Install a version of {module} that has {name}, or the version that the program asks for.",
        ),
        Step(
            r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'",
            "Install a version of {module} that has {name}, or the version that the program asks for.",
        ),
    ),
)
ASSERTION_FAILED = Problem(
    "assertion_failed",
    "other",
    "assertion of the program failed",
    (Cause("A condition that the program requires does not hold; its line says which."),),
    "Read the line of the assertion, and print the values in it.",
)
NETWORK_ERROR = Problem(
    "network_error",
    "other",
    "download or connection failed",
    (
        Cause("The machine has no access to the network, or needs a proxy."),
        Cause("The server is down, or refuses the request."),
    ),
    "Check the address with `curl -I` from this machine, or download the files in advance.",
)
PROGRAM_ERROR = Problem(
    "program_error",
    "other",
    "error of no known class, raised by the program",
    (Cause("Nothing more is known of this message; it and the innermost line of your own code say what and where."),),
    "Read the message and the line of your own code where it was raised.",
)
