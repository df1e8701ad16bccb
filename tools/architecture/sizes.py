"""Sizes that invite a look: `python -m tools.architecture.sizes`, which `make lint` runs, lists them and never fails.

A module of 150 to 400 lines that holds one subject is right. A shorter one that a single module imports may belong
into that module; a longer one, a long function or a crowded package may hold two subjects.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tools.architecture.source import imports, modules

MANY_LINES = 400
FEW_LINES = 60
LONG_FUNCTION_LINES = 60
MANY_MODULES = 15  # of a package, without subpackages and __init__


def report() -> Iterator[str]:
    """Yield a line for each module, function and package of an unusual size."""
    importers = {
        name: {found.importer.name for found in imports() if found.imported.name == name} for name in modules()
    }
    for name, module in modules().items():
        lines = module.path.read_text(encoding="utf-8").count("\n")
        if lines > MANY_LINES:
            yield f"{name}: {lines} lines"
        elif lines < FEW_LINES and not module.is_package and len(importers[name]) == 1:
            yield f"{name}: {lines} lines, for {importers[name].pop()} only"
        yield from (f"{name}.{node.name}: {lines} lines" for node, lines in _long_functions(module.nodes))
    packages = Counter(name.rpartition(".")[0] for name, module in modules().items() if not module.is_package)
    yield from (f"{package}: {count} modules" for package, count in packages.items() if count > MANY_MODULES)


def _long_functions(nodes: list[ast.AST]) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONG_FUNCTION_LINES:
                yield node, lines


if __name__ == "__main__":
    print("Sizes that invite a look (no error):", *report(), sep="\n  ")
