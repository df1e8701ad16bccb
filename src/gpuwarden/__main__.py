"""Command `gpuwarden`, also as `python -m gpuwarden`.

It imports nothing that is not loaded at start: PYTHONPATH may have a types.py that is none of Python's.
"""

import os
import sys


def start() -> None:
    """Run the command line and exit; `run` without what PYTHONPATH and Python's other variables do to its program."""
    if sys.flags.isolated:
        sys.path.append(__file__.rpartition("/gpuwarden/")[0])  # a user's, which isolated mode leaves out
    elif sys.argv[1:2] == ["run"]:
        os.execve(sys.executable, isolated_command(*sys.argv[1:]), _read_environment())  # noqa: S606 - no shell
    elif not (getattr(sys.flags, "safe_path", False) or __file__.startswith(sys.path[0])):
        # -m puts the working folder first on the path, where a random.py would be imported in place of Python's.
        del sys.path[0]
    from gpuwarden.cli.main import main  # noqa: PLC0415 - after the path is right

    sys.exit(main())


def isolated_command(*arguments: str) -> list[str]:
    """Return the command that runs this gpuwarden in an interpreter that no variable and no working folder changes."""
    return [sys.executable, "-I", __file__, *arguments]


def _read_environment() -> dict[bytes, bytes]:
    """Return the environment that this process was started with; Python and a sitecustomize may have changed it."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
            pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
    except OSError:
        return dict(os.environb)
    return {name: value for name, equals, value in pairs if equals}


if __name__ == "__main__":
    start()
