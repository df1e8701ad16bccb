"""Checks of environment variables that change what a framework does on a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gpuwarden.doctor.frameworks.environment import Environment, InterpreterError, read_environment
from gpuwarden.doctor.model import CheckResult, Context, check, failed, passed, skipped, warned

KERAS_BACKENDS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax", "numpy": "numpy", "openvino": "openvino"}
_CUDA_FOLDER = re.compile(r"--xla_gpu_cuda_data_dir=(\S+)")


class Variable(NamedTuple):
    """A variable, and when a value of it is worth a warning."""

    name: str
    bites: Callable[[str], bool]
    why: str
    fix: str


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on")


# Sources: TensorFlow's gpu_bfc_allocator.cc (it compares with "true" and "false" exactly), gpu_process_state.cc and its
# guide "Use a GPU"; XLA's debug_options_flags.cc; "JAX GPU memory allocation"; CUDA C++ Programming Guide, "CUDA
# Environment Variables"; torch's "CUDA Environment Variables".
VARIABLES = (
    Variable(
        "TF_FORCE_GPU_ALLOW_GROWTH",
        lambda value: value not in ("true", "false"),
        "TensorFlow takes only `true` and `false`: another value has no effect, and it reserves the whole GPU.",
        "export TF_FORCE_GPU_ALLOW_GROWTH=true",
    ),
    Variable(
        "TF_GPU_ALLOCATOR",
        lambda value: value != "cuda_malloc_async",
        "TensorFlow knows `cuda_malloc_async` (and `cuda_malloc`, slow, for debugging); another value has no effect.",
        "export TF_GPU_ALLOCATOR=cuda_malloc_async",
    ),
    Variable(
        "TF_CPP_MIN_LOG_LEVEL",
        lambda value: value in ("2", "3"),
        "It hides the lines in which TensorFlow says why it does not use the GPU.",
        "unset TF_CPP_MIN_LOG_LEVEL",
    ),
    Variable(
        "TF_DETERMINISTIC_OPS",
        _is_on,
        "Deterministic kernels are slower, and operations without one raise an error.",
        "unset TF_DETERMINISTIC_OPS",
    ),
    Variable(
        "XLA_FLAGS",
        lambda value: "--xla_gpu_deterministic_ops" in value or "--xla_gpu_autotune_level=0" in value,
        "XLA then chooses slower kernels.",
        "Remove that flag from XLA_FLAGS.",
    ),
    Variable(
        "XLA_FLAGS",
        lambda value: any(not Path(each).is_dir() for each in _CUDA_FOLDER.findall(value)),
        "XLA searches ptxas and libdevice in a folder that does not exist: compilation fails.",
        "Correct --xla_gpu_cuda_data_dir in XLA_FLAGS, or remove it.",
    ),
    Variable(
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        lambda value: value == "platform",
        "JAX asks the driver for each allocation, which is slow.",
        "unset XLA_PYTHON_CLIENT_ALLOCATOR",
    ),
    Variable(
        "JAX_PLATFORMS",
        lambda value: bool(value) and not {"cuda", "gpu", "rocm"} & set(value.split(",")),
        "JAX uses no GPU.",
        "unset JAX_PLATFORMS",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        lambda value: value not in ("", "0"),
        "Each kernel is waited for: training is slower. It is for debugging.",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    Variable(
        "CUDA_CACHE_DISABLE",
        lambda value: value not in ("", "0"),
        "The driver compiles PTX again in every process.",
        "unset CUDA_CACHE_DISABLE",
    ),
    Variable(
        "NVIDIA_TF32_OVERRIDE",
        lambda value: value == "0",
        "Matrix products in float32 do not use TF32, which is several times as fast.",
        "unset NVIDIA_TF32_OVERRIDE",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _is_on,
        "torch asks the driver for each allocation, which is slow.",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
    ),
    Variable(
        "LD_PRELOAD",
        lambda value: re.search(r"libcu(da|dart|dnn|blas)", value) is not None,
        "Each process loads this CUDA library, whichever its framework was built for.",
        "unset LD_PRELOAD",
    ),
)


@check("environment.variables", "No environment variable slows a framework or keeps it from the GPU.")
def _check_variables(context: Context) -> Iterator[CheckResult]:
    found = [
        warned(f"{each.name} is set to {value!r}.", each.why, each.fix)
        for each in VARIABLES
        if (value := context.environ.get(each.name)) is not None and each.bites(value)
    ]
    if found:
        yield from found
        return
    names = [name for name in dict.fromkeys(each.name for each in VARIABLES) if name in context.environ]
    text = f"{', '.join(names)} is set, to a usual value." if names else "No variable changes what a framework does."
    yield passed(text)


@check("keras.backend", "Keras' backend is installed and can train.")
def _check_keras(context: Context) -> Iterator[CheckResult]:
    try:
        environment = read_environment(context)
    except InterpreterError:
        return
    keras = environment.distribution("keras")
    if context.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true") and environment.find("tf_keras") is None:
        yield failed(
            "TF_USE_LEGACY_KERAS is set, and tf_keras is not installed.",
            "`tf.keras` fails at import.",
            fix=environment.pip("install", "tf_keras"),
        )
        return
    if keras is None:
        yield skipped("Keras is not installed.")
        return
    if int(keras.version.partition(".")[0]) < 3:  # noqa: PLR2004 - Keras 2 has one backend
        yield passed(f"Keras {keras.version} on TensorFlow.")
        return
    backend, source = _read_backend(context.environ)
    yield _judge_backend(f"Keras {keras.version}", backend, source, environment)


def _read_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return Keras' backend and where it is set, in the order that Keras reads them."""
    if backend := environ.get("KERAS_BACKEND"):
        return backend, "KERAS_BACKEND"
    home = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME", "/"), ".keras"))
    file = home / "keras.json"
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["backend"]), str(file)
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow", "the default"


def _judge_backend(title: str, backend: str, source: str, environment: Environment) -> CheckResult:
    module = KERAS_BACKENDS.get(backend)
    if module is None or environment.find(module) is None:
        known = "which is not installed" if module else "which Keras does not know"
        return failed(
            f"{title} has the backend {backend} by {source}, {known}.",
            "`import keras` fails.",
            fix=f"Install {backend}, or set KERAS_BACKEND to one of {', '.join(KERAS_BACKENDS)}.",
        )
    if backend in ("numpy", "openvino"):
        return warned(
            f"{title} has the backend {backend} by {source}.", "It cannot train.", fix="export KERAS_BACKEND=tensorflow"
        )
    return passed(f"{title} has the backend {backend} by {source}.")


VARIABLE_CHECKS = (_check_variables, _check_keras)
