"""First code in a Python process under `gpuwarden run`: hooks for imports and errors; no framework is imported for it.

Python imports it at start where its folder is in PYTHONPATH. It must parse on Python 3.6, must not slow the start, and
must never keep a program from starting.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
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
_HIGH_DESCRIPTOR = 1000  # below the usual limit of 1024
_RESERVE_BYTES = 4 << 20  # Python's own memory grows by 1 MiB
_MAX_CHAIN = 8  # errors: the last one, its causes, and the members of a group
_MAX_FRAMES = 100  # of each, the innermost
_MAX_MESSAGE_CHARACTERS = 4000  # of each, half from its end: XLA lists every buffer
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _ImportHook:
    """Finder that installs instrumentation in a module once the program imports it, and finds this gpuwarden."""

    gpuwarden_run = True

    def __init__(self, log: "_Log") -> None:
        self._log = log

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
            spec.loader = _InstallingLoader(spec.loader, self._log)  # type: ignore[assignment] # it forwards to a loader
        return spec


class _InstallingLoader:
    """Loader that installs instrumentation in the module that the original loader has executed."""

    def __init__(self, loader: "Any", log: "_Log") -> None:
        self._loader = loader
        self._log = log

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module with its own loader, which `inspect` and `pkgutil` find in it, and instrument it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if module.__name__ == "threading":
            self._log.keep_of_threads(module)
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
    log = _Log()
    sys.meta_path.insert(0, _ImportHook(log))
    _keep_uncaught(log)
    if "threading" in sys.modules:
        log.keep_of_threads(sys.modules["threading"])
    _keep_fatal_signals(log)


class _Log:
    """Log of this process for the launcher (protocol/run_folder.py reads it); takes each type of error once an origin.

    It is open and has its memory from the start: an error may come when there is no descriptor or memory left.
    """

    def __init__(self) -> None:
        self._reserve = bytes(_RESERVE_BYTES)  # of calloc: until it is written to, it takes addresses but no memory
        self.kept: set[tuple[str, type]] = set()
        self._file: os.stat_result | None = None
        self.descriptor = -1
        try:
            self.descriptor = _move_up(_open_log())
            self._file = os.fstat(self.descriptor)
        except OSError:  # the folder is gone
            pass

    def keep_error(self, error: "Any", origin: str) -> None:
        """Append an error that nothing caught; `origin` is what it ended: program, thread or finalizer."""
        # Not a plain interrupt: Python ends itself by SIGINT, unless code of ours runs in between.
        if error is None or isinstance(error, KeyboardInterrupt) or (origin, type(error)) in self.kept:
            return
        self._reserve = b""
        try:
            self.kept.add((origin, type(error)))
            chain = _list_chain(error)
            if any(isinstance(each, KeyboardInterrupt) for each in chain):
                origin = "interrupt"
            head = f"{os.getpid()} {time.time()} {origin} {type(error).__name__}"
            text = "\n".join(_format_chain(chain)).replace("\0", " ")
            self._append(f"\0{head}\n{text}\0".encode("utf-8", "backslashreplace"))
        except BaseException:  # a second interrupt, too: the error is still to be printed
            pass

    def _append(self, data: bytes) -> None:
        try:
            is_open = self._file is not None and os.path.samestat(os.fstat(self.descriptor), self._file)
        except OSError:  # the program has closed all files
            is_open = False
        os.write(self.descriptor if is_open else _open_log(), data)

    def keep_of_threads(self, threading: "Any") -> None:
        """Keep the errors that end threads, while the program goes on."""
        before = threading.excepthook

        def keep_of_thread(ended: "Any") -> None:
            if ended.exc_type is not SystemExit:
                self.keep_error(ended.exc_value, "thread")
            before(ended)

        threading.excepthook = keep_of_thread


def _open_log() -> int:
    path = os.path.join(os.environ.get("GPUWARDEN_RUN_FOLDER") or "/dev/null", f"{os.getpid()}.log")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _list_chain(error: BaseException) -> "list[BaseException]":
    """Return the error, the members of a group, and the errors from which or while handling which they were raised."""
    chain = [error]
    for each in chain:
        before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        chain += [one for one in (*_list_members(each), before) if one is not None and one not in chain]
        if len(chain) >= _MAX_CHAIN:
            break
    return chain[:_MAX_CHAIN]


def _list_members(error: BaseException) -> "tuple[BaseException, ...]":
    return getattr(error, "exceptions", ()) if hasattr(error, "subgroup") else ()


def _format_chain(chain: "list[BaseException]") -> "Iterator[str]":
    """Yield the lines of errors as Python prints them, without code and without groups, the last one at last."""
    parts = [each for each in reversed(chain) if not _list_members(each)]
    for each in parts:
        if each is not parts[0]:
            yield "\nThe above exception was the direct cause of the following exception:\n"
        yield "Traceback (most recent call last):"
        yield from _format_frames(each)
        cls = type(each)
        module = "" if cls.__module__ in ("builtins", "__main__") else cls.__module__ + "."
        yield module + cls.__qualname__ + _format_message(each)


def _format_message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # of the error's own __str__
        return ""
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        half = _MAX_MESSAGE_CHARACTERS // 2
        text = text[:half] + " ... " + text[-half:]
    return text and ": " + text


def _format_frames(error: BaseException) -> "Iterator[str]":
    """Yield the innermost frames of an error, and the place of a wrong syntax."""
    last = error.__traceback__
    ahead = last
    for _ in range(_MAX_FRAMES):
        ahead = ahead and ahead.tb_next
    while last is not None and ahead is not None:
        last, ahead = last.tb_next, ahead.tb_next
    while last is not None:
        code = last.tb_frame.f_code
        yield f'  File "{code.co_filename}", line {last.tb_lineno}, in {code.co_name}'
        last = last.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        yield f'  File "{error.filename}", line {error.lineno}'


def _keep_uncaught(log: _Log) -> None:
    """Keep the error that ends the program, and those that Python ignores; the hooks before these still print them."""
    import atexit

    uncaught, unraisable = sys.excepthook, sys.unraisablehook

    def keep_uncaught(cls: "Any", error: "Any", trace: "Any") -> None:
        if not hasattr(sys, "ps1"):  # a prompt goes on after an error
            log.keep_error(error, "program")
        uncaught(cls, error, trace)

    def keep_unraisable(ignored: "Any") -> None:
        log.keep_error(ignored.exc_value, "finalizer")
        unraisable(ignored)

    def keep_last() -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or isinstance(error, KeyboardInterrupt) or any(origin == "program" for origin, _ in log.kept):
            return
        from gpuwarden.client.errors.uncaught import find_uncaught_type  # the program has an excepthook of its own

        if find_uncaught_type() is not None:
            log.keep_error(error, "program")

    sys.excepthook, sys.unraisablehook = keep_uncaught, keep_unraisable
    atexit.register(keep_last)


def _keep_fatal_signals(log: _Log) -> None:
    """Let faulthandler write where the process is when a signal ends it, unless the program wants that elsewhere."""
    import faulthandler

    if log.descriptor >= 0 and not faulthandler.is_enabled():
        faulthandler.enable(log.descriptor)


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
