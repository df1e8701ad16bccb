"""First code in a Python process under `gpuwarden run`: hooks for imports and errors; no framework is imported for it.

Python imports it at start where its folder is in PYTHONPATH. It must parse on Python 3.6, must not slow the start, and
must never keep a program from starting.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Module that the program imports: module of gpuwarden.client.boot whose `install` gets it.
_INSTALLERS = {
    "keras.src.callbacks.callback_list": "keras_steps",  # Keras 3
    "keras.src.callbacks": "keras_steps",  # Keras 2
    "tf_keras.src.callbacks": "keras_steps",
    "torch.optim.optimizer": "torch_steps",
}
_kept: "set[tuple[str, type]]" = set()  # errors kept, by origin and type: one may end many threads
_HIGH_DESCRIPTOR = 1000  # below the usual limit of 1024
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _ImportHook:
    """Finder that installs instrumentation in a module once the program imports it, and finds this gpuwarden."""

    gpuwarden_run = True

    def find_spec(self, name: str, path: "Any" = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
        """Return a wanted module's spec, found by the other finders; None for any other module."""
        if name not in _INSTALLERS and name not in ("gpuwarden", "threading"):
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        if name == "gpuwarden":
            return _choose_gpuwarden(spec)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _InstallingLoader(spec.loader)  # type: ignore[assignment] # it forwards to a loader
        return spec


class _InstallingLoader:
    """Loader that installs instrumentation in the module that the original loader has executed."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module with its own loader, which `inspect` and `pkgutil` find in it, and instrument it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if module.__name__ == "threading":
            _keep_of_threads(module)
        else:
            _install(_INSTALLERS[module.__name__], module)


def _choose_gpuwarden(found: "ModuleSpec | None") -> "ModuleSpec | None":
    """Return the program's own gpuwarden where it has this package, else the one of `gpuwarden run`."""
    if found is not None and found.origin and os.path.isdir(os.path.join(os.path.dirname(found.origin), "client/boot")):
        return found
    from importlib.util import spec_from_file_location

    return spec_from_file_location(
        "gpuwarden",
        os.path.join(_PACKAGE, "__init__.py"),
        submodule_search_locations=[_PACKAGE],
    )


def _install(installer: str, module: "Any") -> None:
    try:
        from importlib import import_module

        import_module("gpuwarden.client.boot." + installer).install(module)
    except Exception:  # the program runs as without gpuwarden, and is not counted
        pass


def _chain() -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [each for each in sys.path if each != _FOLDER]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - the program's
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


def _start() -> None:
    if sys.version_info < (3, 10) or os.environ.get("GPUWARDEN_RUN") != "1":
        return
    if any(hasattr(each, "gpuwarden_run") for each in sys.meta_path):
        return  # a run within a run has installed its own
    sys.meta_path.insert(0, _ImportHook())
    _keep_uncaught()
    if "threading" in sys.modules:
        _keep_of_threads(sys.modules["threading"])
    _keep_fatal_signals(os.environ.get("GPUWARDEN_RUN_FOLDER"))


def _keep_uncaught() -> None:
    """Keep the error that ends the program, and those that Python ignores; the hooks before these still print them."""
    import atexit

    uncaught, unraisable = sys.excepthook, sys.unraisablehook

    def keep_uncaught(cls: "Any", error: "Any", trace: "Any") -> None:
        if not hasattr(sys, "ps1"):  # a prompt goes on after an error
            _keep_error(error, "program")
        uncaught(cls, error, trace)

    def keep_unraisable(ignored: "Any") -> None:
        _keep_error(ignored.exc_value, "finalizer")
        unraisable(ignored)

    def keep_last() -> None:
        if all(origin != "program" for origin, _ in _kept):  # the program has an excepthook of its own
            _keep_error(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None), "printed")

    sys.excepthook, sys.unraisablehook = keep_uncaught, keep_unraisable
    atexit.register(keep_last)


def _keep_of_threads(threading: "Any") -> None:
    """Keep the errors that end threads, while the program goes on."""
    before = threading.excepthook

    def keep_of_thread(ended: "Any") -> None:
        if ended.exc_type is not SystemExit:
            _keep_error(ended.exc_value, "thread")
        before(ended)

    threading.excepthook = keep_of_thread


def _keep_error(error: "Any", origin: str) -> None:
    # Nor an interrupt: an import here would make Python forget that it has to end itself by SIGINT.
    if error is None or isinstance(error, KeyboardInterrupt) or (origin, type(error)) in _kept:
        return
    _kept.add((origin, type(error)))
    try:
        from importlib import import_module

        import_module("gpuwarden.client.boot.program_error").keep_error(error, origin)
    except BaseException:  # a second interrupt, too: the error is still to be printed
        pass


def _keep_fatal_signals(folder: "str | None") -> None:
    """Let faulthandler write where the process is when a signal ends it, unless the program wants that elsewhere."""
    import faulthandler

    if folder and not faulthandler.is_enabled():
        # read_crashes in protocol/run_folder.py reads it by this name.
        path = os.path.join(folder, f"{os.getpid()}.faults")
        faulthandler.enable(_move_up(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)))


def _move_up(descriptor: int) -> int:
    """Return the descriptor by a number that no other file gets soon: faulthandler writes to it even once closed."""
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
    except OSError:  # the limit of open files is lower
        return descriptor
    os.close(descriptor)
    return high


try:
    _chain()
finally:
    try:
        _start()
    except BaseException:  # even an interrupt here would end the program before its first line
        pass
