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
