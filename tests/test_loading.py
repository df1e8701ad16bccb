"""What the daemon does not keep of what it has loaded."""

import subprocess
import sys


def run(code: str) -> None:
    """Run in a Python of its own: this one has loaded too much."""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forgets_yaml() -> None:
    """Nothing holds PyYAML once a file is read, a wrong one too, and the next file is read as before."""
    run(
        "import sys, weakref; from gpuwarden import config, loading\n"
        "def refused():\n"
        "    try: config.parse('log: {level: loud}\\npoll: [', 'f')\n"
        "    except config.ConfigError: return True\n"
        "config.parse('log: {level: debug}', 'f'); assert refused()\n"
        "kept = weakref.ref(sys.modules['yaml'].SafeLoader); loading.forget('yaml')\n"
        "assert kept() is None and not [name for name in sys.modules if name.startswith('yaml')]\n"
        "assert config.parse('log: {level: debug}', 'f').log.level == 'debug'"
    )


def test_forgets_the_command_line() -> None:
    """Nothing holds argparse once a command line is read, a wrong one too, and the next is read as before."""
    run(
        "import sys, weakref; from gpuwarden import loading\n"
        "def read(*words):\n"
        "    from gpuwarden.arguments import parse\n"
        "    return parse(words)\n"
        "assert read('serve', '--listen', 'localhost:1').listen == 'localhost:1'\n"
        "try: read('serve', '--port')\n"
        "except SystemExit as ended: assert ended.code == 2\n"
        "kept = weakref.ref(sys.modules['argparse'].ArgumentParser)\n"
        "loading.forget('argparse', 'gettext', 'gpuwarden.arguments')\n"
        "assert kept() is None\n"
        "assert not {'argparse', 'gettext', 'gpuwarden.arguments'} & set(sys.modules)\n"
        "assert read('top').command == 'top'"
    )


def test_goes_without_libyaml() -> None:
    """PyYAML's extension in C, which could not be given back, is not loaded; others can still import it."""
    run(
        "import sys; from gpuwarden import config; config.parse('{}', 'f');"
        "assert 'yaml' in sys.modules and 'yaml._yaml' not in sys.modules; import yaml._yaml"
    )


def test_nothing_changes_for_what_is_loaded() -> None:
    """A module that somebody has loaded already stays importable."""
    run(
        "import json, sys; from gpuwarden.loading import without\n"
        "with without('json'): import json as again\n"
        "assert again is json is sys.modules['json']"
    )
