"""Problems of versions: driver, CUDA and its libraries, framework, compilers."""

from __future__ import annotations

from gpuwarden.errors.problems import FRAMEWORK_REGEXES, Cause, Problem, Step, install_steps

DRIVER_TOO_OLD = Problem(
    "driver_too_old",
    "library_mismatch",
    "driver older than the framework's CUDA",
    (
        Cause("The driver does not support the CUDA version that the framework was built with.", ("framework.driver",)),
        Cause(
            "The container brings a CUDA compatibility library that this driver or GPU does not support.",
            ("framework.libraries",),
        ),
    ),
    "Update the NVIDIA driver, or install a framework build for an older CUDA.",
    steps=(
        Step(
            r"too old \(found version (?P<major>\d\d)0(?P<minor>\d)0\)",  # torch
            "Update the NVIDIA driver, which has CUDA {major}.{minor}, or install a build of torch for that CUDA.",
        ),
    ),
)
DRIVER_LIBRARY_MISMATCH = Problem(
    "driver_library_mismatch",
    "library_mismatch",
    "kernel module and driver libraries of different versions",
    (
        Cause("The driver was updated, and the old kernel module is still loaded.", ("driver.versions",)),
        Cause("The container or LD_LIBRARY_PATH brings libraries of another driver.", ("framework.libraries",)),
    ),
    "Reboot, or unload and load the NVIDIA kernel modules.",
    steps=(
        Step(
            # TensorFlow
            r"kernel version (?P<kernel>\d[\d.]*\d) does not match DSO version (?P<library>\d[\d.]*\d)",
            "Reboot, as the kernel module is {kernel} and the libraries are {library}; in a container remove the "
            "image's own libcuda.so.",
        ),
        Step(
            # Linux
            r"client has the version (?P<library>\d[\d.]*\d)(?s:.*?) has the version (?P<kernel>\d[\d.]*\d)",
            "Reboot, as the kernel module is {kernel} and the libraries are {library}; in a container remove the "
            "image's own libraries of the driver.",
        ),
    ),
)
CUDNN_MISMATCH = Problem(
    "cudnn_mismatch",
    "library_mismatch",
    "no cuDNN, or a version that does not fit",
    (
        Cause("The installed cuDNN is not the version that the framework was built with.", ("framework.packages",)),
        Cause("LD_LIBRARY_PATH puts another cuDNN before the framework's own.", ("framework.libraries",)),
        Cause("GPU memory is full, so that cuDNN cannot start.", ("memory.gpu",)),
    ),
    "Unset LD_LIBRARY_PATH and reinstall the framework with its own CUDA packages.",
    steps=install_steps("Unset LD_LIBRARY_PATH and reinstall the framework with its own CUDA packages: {}."),
)
CUDA_MISMATCH = Problem(
    "cuda_mismatch",
    "library_mismatch",
    "CUDA libraries of different versions",
    (
        Cause("Installed nvidia-* packages are not the versions that the framework requires.", ("framework.packages",)),
        Cause("LD_LIBRARY_PATH puts another CUDA before the framework's own.", ("framework.libraries",)),
        Cause("An extension is built with another CUDA than the framework."),
    ),
    "Unset LD_LIBRARY_PATH, and reinstall the framework with its CUDA packages in a new environment.",
)
LIBRARY_INIT_FAILED = Problem(
    "library_init_failed",
    "library_mismatch",
    "failed start of cuDNN or cuBLAS",
    (
        Cause("GPU memory is full, which these libraries report as a failed start.", ("memory.gpu",)),
        Cause(
            "The library does not fit the driver, the GPU or the framework.", ("framework.packages", "driver.versions")
        ),
        Cause("An earlier error left the GPU's context unusable."),
    ),
    # Memory growth mends most of these for TensorFlow, which reserves the GPU: tensorflow/tensorflow#24496.
    "Free GPU memory (`nvidia-smi` shows its users), and for TensorFlow set TF_FORCE_GPU_ALLOW_GROWTH=true; then "
    "compare the library's version with the framework's.",
    (
        *("device_out_of_memory", "driver_too_old", "driver_library_mismatch", "cudnn_mismatch", "cuda_mismatch"),
        *("library_not_found", "unsupported_compute_capability", "device_assert", "illegal_address", "ecc_error"),
        *("gpu_lost", "gpu_fault", "no_device_visible"),
    ),
    (
        Step(
            FRAMEWORK_REGEXES["jax"],
            "Free GPU memory (`nvidia-smi` shows its users), and set XLA_PYTHON_CLIENT_PREALLOCATE=false; then compare "
            "the library's version with jaxlib's.",
        ),
        Step(
            FRAMEWORK_REGEXES["torch"],
            "Free GPU memory (`nvidia-smi` shows its users); then compare the library's version with torch's.",
        ),
    ),
)
LIBRARY_NOT_FOUND = Problem(
    "library_not_found",
    "library_mismatch",
    "shared library not found",
    (
        Cause("The framework's CUDA packages are not installed in this environment.", ("framework.packages",)),
        Cause("The library is installed, but the loader does not search its folder.", ("framework.libraries",)),
        Cause("The framework needs another version of CUDA than the one installed.", ("framework.build",)),
    ),
    "Install the package that has the library in this environment; the message names it.",
    steps=(
        Step(
            r"JIT_COMPILER_NOT_FOUND|PTX JIT compiler library|libnvidia-[\w-]+\.so|libcuda\.so",
            "Reinstall the driver, to which it belongs; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ),
        Step(
            r"(?P<library>lib(?!cu|nv|nccl|tensorflow|torch|c10|tensorrt)[\w.+-]+\.so[\w.]*): cannot open",
            "Install the system's package that has {library}, such as with apt or conda.",
        ),
        *install_steps("Install the framework with its CUDA libraries in this environment: {}."),
    ),
)
UNSUPPORTED_COMPUTE_CAPABILITY = Problem(
    "unsupported_compute_capability",
    "library_mismatch",
    "no code for this GPU's compute capability in the build",
    (
        Cause("The GPU is newer than the framework's build.", ("framework.gpus",)),
        Cause("The GPU is older than the build supports.", ("framework.gpus",)),
        Cause("An extension was compiled for another GPU."),
    ),
    "Install a framework build that lists this GPU's compute capability.",
    steps=(
        Step(
            r"(?P<capability>sm_\d+\w?) is not compatible with the current PyTorch",
            "Install a build of torch that lists {capability}: pick the newest CUDA at https://pytorch.org.",
        ),
    ),
)
PACKAGE_MISMATCH = Problem(
    "package_mismatch",
    "library_mismatch",
    "packages of versions that do not fit together",
    (
        Cause("An upgrade changed one package of a set that belongs together.", ("framework.packages",)),
        Cause("A binary package was built for another version of NumPy, of the framework or of the C library."),
    ),
    "Install the packages again together, in a new environment, with the versions that the message names.",
)
AUTOTUNING_FAILED = Problem(
    "autotuning_failed",
    "library_mismatch",
    "no working kernel found (autotuning)",
    (
        Cause("XLA or cuDNN of this version has none for this operation, type and GPU.", ("framework.gpus",)),
        Cause("GPU memory is full while the candidates are tried.", ("memory.gpu",)),
        Cause("The installed cuDNN is not the framework's own.", ("framework.packages", "framework.libraries")),
    ),
    # jax-ml/jax#33715, ROCm/TheRock#4270
    "Run once with XLA_FLAGS=--xla_gpu_autotune_level=0; if that helps, try another version of the framework, e.g. of "
    "jaxlib.",
    ("device_out_of_memory", "library_init_failed", "cudnn_mismatch", "library_not_found"),
    (Step(r"engine config|execution plan", "Update cuDNN and the framework, so that they have this operation."),),
)
XLA_COMPILE = Problem(
    "xla_compile",
    "library_mismatch",
    "compilation for the GPU failed (XLA, ptxas, Triton)",
    (
        Cause("ptxas or libdevice of the CUDA toolkit is missing or not found.", ("framework.libraries",)),
        Cause("ptxas is too old for the GPU.", ("framework.gpus",)),
        Cause("The compiled kernel needs more registers or shared memory than the GPU has."),
    ),
    "Install the CUDA toolkit of the framework's version, and set XLA_FLAGS=--xla_gpu_cuda_data_dir to its folder.",
)
