"""Builds of TensorFlow, torch and JAX as installed: versions, CUDA libraries and GPUs that each was made for."""

from __future__ import annotations

import ast
import json
import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpuwarden.doctor.frameworks.cuda_versions import LIBRARIES, Version, parse_cudnn, parse_version
from gpuwarden.doctor.frameworks.elf import DynamicSection, read_dynamic_section
from gpuwarden.doctor.frameworks.environment import Environment, InterpreterError, run_python
from gpuwarden.doctor.frameworks.requirements import list_requirements
from gpuwarden.doctor.model import Context

_CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit)")
_TORCH_TARGETS = re.compile(rb"\0((?:sm|compute)_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*)\0")
_JAX_PROGRAM = """import sys
sys.path[:] = filter(None, sys.path)
import importlib.machinery as machinery, importlib.util as util, json
spec = machinery.PathFinder.find_spec("_versions", [sys.argv[1]])
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([module.cuda_runtime_build_version(), module.cudnn_build_version()]))"""


class BuildFileError(Exception):
    """Damage of a file that says what a framework is built for; the text has the file and the damage."""


@dataclass(frozen=True)
class Build:
    """Build of a framework.

    `cuda` and `cudnn` are versions, empty if it has none. `targets` are the GPUs it has kernels for, as sm_XY and
    compute_XY; None if it compiles them itself. `libraries` are the CUDA libraries that it loads, `search` says where
    it searches. `requirements` include those on CUDA packages. `wanted` is the pip requirement of a build for CUDA.
    """

    version: str
    cuda: Version
    cudnn: Version
    targets: tuple[str, ...] | None
    libraries: tuple[str, ...]
    search: DynamicSection
    requirements: tuple[Requirement, ...]
    wanted: str
    min_cudnn: Version = ()  # that its pins allow, else the one it was built with
    other: str = ""  # what it is built for in place of CUDA: "ROCm"


@dataclass(frozen=True)
class KnownFramework:
    """A framework. `family` has the distributions that install its module, of which an environment needs one.

    `read` returns its build, None if it is not installed. Raises BuildFileError.
    """

    title: str
    module: str
    family: tuple[str, ...]
    read: Callable[[Environment, Context], Build | None]


class InstalledBuild(NamedTuple):
    """A framework's build in its environment, and the machine that it is on."""

    framework: KnownFramework
    build: Build
    environment: Environment
    context: Context

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.framework.title} {self.build.version}".rstrip()

    @property
    def severity(self) -> Literal["warn", "fail"]:
        """Status of what keeps the framework from a GPU: a machine without one may have such a build on purpose."""
        return "fail" if has_gpu(self.context) else "warn"

    def install(self) -> str:
        """Return the command that installs a build for CUDA with its libraries."""
        return self.environment.pip("install", f"'{self.build.wanted}'")


def has_gpu(context: Context) -> bool:
    """Return whether the machine has a GPU, one that does not answer included."""
    return bool(context.survey().gpus) or any((context.dev / name).exists() for name in ("nvidiactl", "dxg"))


def read_tensorflow(environment: Environment, _context: Context) -> Build | None:
    """Read `build_info` of TensorFlow; None if there is no such file."""
    file = environment.find_file("tensorflow", "python", "platform", "build_info.py")
    if file is None:
        return None
    facts = _read_build_info(file)
    distribution = next(filter(None, map(environment.distribution, TENSORFLOW.family)), None)
    cuda, cudnn = (parse_version(str(facts.get(key, ""))) for key in ("cuda_version", "cudnn_version"))
    names = LIBRARIES.get(cuda[0], ()) if cuda else ()
    version = "" if distribution is None else distribution.version
    library = environment.find_file("tensorflow", "libtensorflow_framework.so.2")
    return Build(
        version=version,
        cuda=cuda if facts.get("is_cuda_build") else (),
        cudnn=cudnn,
        targets=tuple(map(str, facts.get("cuda_compute_capabilities", ()))),
        libraries=(*names, *(f"libcudnn.so.{cudnn[0]}" for _ in cudnn[:1])),
        search=DynamicSection() if library is None else read_dynamic_section(library),
        requirements=_requirements(environment, distribution, "and-cuda" if facts.get("is_cuda_build") else ""),
        # Before 2.14 the wheel has no such extra: CUDA comes from the system.
        wanted=f"tensorflow{'[and-cuda]' if parse_version(version) >= (2, 14) else ''}=={version}",
        min_cudnn=_find_min_cudnn(environment, distribution, "and-cuda") or cudnn,
        other="ROCm" if facts.get("is_rocm_build") else "",
    )


def read_torch(environment: Environment, _context: Context) -> Build | None:
    """Read `torch/version.py` and torch's libraries; None if there is no such file."""
    file = environment.find_file("torch", "version.py")
    if file is None:
        return None
    facts = _read_assignments(file)
    distribution = environment.distribution("torch")
    cuda = parse_version(str(facts.get("cuda") or ""))
    sections = [
        read_dynamic_section(library)
        for name in ("libtorch_cuda.so", "libtorch_cuda_linalg.so")
        if (library := environment.find_file("torch", "lib", name))
    ]
    python_library = environment.find_file("torch", "lib", "libtorch_python.so")
    version = str(facts.get("__version__", ""))
    needed = dict.fromkeys(name for each in sections for name in each.needed if _CUDA_LIBRARY.match(name))
    cudnn = next((parse_version(each.rpartition(".")[2]) for each in needed if each.startswith("libcudnn.")), ())
    return Build(
        version=version,
        cuda=cuda,
        cudnn=cudnn,
        targets=_read_torch_targets(python_library) if cuda and python_library else (),
        libraries=tuple(needed),
        search=sections[0] if sections else DynamicSection(),
        requirements=_requirements(environment, distribution),
        wanted=f"torch=={version.partition('+')[0]}",
        min_cudnn=_find_min_cudnn(environment, distribution) or cudnn,
        other="ROCm" if facts.get("hip") or facts.get("rocm") else "XPU" if facts.get("xpu") else "",
    )


def read_jax(environment: Environment, context: Context) -> Build | None:
    """Read JAX's plugin for CUDA: jax and jaxlib alone compute on the CPU. None if there is no JAX."""
    jax = environment.distribution("jax")
    if jax is None or environment.find_file("jax", "__init__.py") is None:
        return None
    requirements = list(_requirements(environment, jax))
    cuda: Version = ()
    cudnn: Version = ()
    search = DynamicSection()
    for major in (13, 12):
        folder = environment.find_file(f"jax_cuda{major}_plugin", "version.py")  # it has no __init__.py
        plugin = environment.distribution(f"jax-cuda{major}-plugin")
        if plugin is not None:
            requirements += _requirements(environment, plugin, "with-cuda")
        if folder is not None and not cuda:
            cuda, cudnn = _read_jax_versions(environment, folder.parent, context)
            library = environment.find_file("jax_plugins", f"xla_cuda{major}", "xla_cuda_plugin.so")
            search = DynamicSection() if library is None else read_dynamic_section(library)
    has_rocm = any(name.startswith("jax-rocm") for name in environment.distributions)
    names = LIBRARIES.get(cuda[0], ()) if cuda else ()
    return Build(
        version=jax.version,
        cuda=cuda,
        cudnn=cudnn,
        targets=None,
        libraries=(*names, *(f"libcudnn.so.{cudnn[0]}" for _ in cudnn[:1])),
        search=search,
        requirements=tuple(requirements),
        wanted=f"jax[cuda{cuda[0] if cuda else 12}]=={jax.version}",
        min_cudnn=cudnn,
        other="ROCm" if has_rocm else "",
    )


TENSORFLOW = KnownFramework(
    "TensorFlow",
    "tensorflow",
    (
        *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-intel"),
        *("tensorflow-cpu-aws", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
    ),
    read_tensorflow,
)
FRAMEWORKS = (
    TENSORFLOW,
    KnownFramework("torch", "torch", ("torch",), read_torch),
    KnownFramework("JAX", "jax", ("jax",), read_jax),
)


def _requirements(
    environment: Environment, distribution: Distribution | None, extra: str = ""
) -> tuple[Requirement, ...]:
    """Return what a distribution requires; with an extra of CUDA packages if any of these is installed."""
    if distribution is None:
        return ()
    plain = tuple(list_requirements(environment, distribution))
    every = tuple(list_requirements(environment, distribution, (extra,))) if extra else plain
    added = [canonicalize_name(each.name) for each in every if each.name.startswith("nvidia")]
    return every if any(environment.distribution(name) for name in added) else plain


def _find_min_cudnn(environment: Environment, distribution: Distribution | None, extra: str = "") -> Version:
    """Return the oldest cuDNN that a distribution's pins allow, whether it is installed from a package or not."""
    for each in list_requirements(environment, distribution, (extra,)) if distribution else ():
        if each.name.startswith("nvidia-cudnn"):
            bounds = [parse_version(one.version) for one in each.specifier if one.operator in ("==", ">=", "~=")]
            return max(bounds, default=())
    return ()


def _read_build_info(file: Path) -> Mapping[str, Any]:
    """Read the literal of the module. Raises BuildFileError."""
    for node in _parse(file):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            try:
                facts = dict(ast.literal_eval(node.value.args[0]))
            except (TypeError, ValueError):
                break
            if "is_cuda_build" in facts:
                return facts
    raise BuildFileError(f"{file} does not say what TensorFlow is built for")


def _read_assignments(file: Path) -> Mapping[str, Any]:
    """Read the module's assignments of literals. Raises BuildFileError."""
    found: dict[str, Any] = {}
    for node in _parse(file):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node.value.value for each in targets if isinstance(each, ast.Name)}
    return found


def _parse(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise BuildFileError(f"{file} cannot be read: {error}") from None


def _read_torch_targets(library: Path) -> tuple[str, ...]:
    """Read the text of torch.cuda.get_arch_list(); empty if the library has none."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(b"\0sm_")
        while at >= 0:
            if found := _TORCH_TARGETS.match(content, at):
                return tuple(found[1].decode().split())
            at = content.find(b"\0sm_", at + 1)
    return ()


def _read_jax_versions(environment: Environment, plugin: Path, context: Context) -> tuple[Version, Version]:
    """Run the plugin's module of versions alone in a process: JAX is not imported."""
    try:
        answer = run_python(environment.python, _JAX_PROGRAM, str(plugin), environ=context.environ)
        cuda, cudnn = json.loads(answer)
    except (InterpreterError, ValueError):
        return (), ()
    # 12090 is 12.9.
    return (cuda // 1000, cuda % 1000 // 10), parse_cudnn(cudnn)
