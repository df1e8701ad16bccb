"""The version, stated once: the package, the page and the tests read it here."""

__version__ = "0.1.0"
