"""Modules of the package and their imports, read from the source without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.architecture.layers import ROOT

SRC = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # in full: gpuwarden.gpu.poller; a package's own file has the package's name
    path: Path
    is_package: bool
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """Package of the module; a module at the top is its own package."""
        parent = self.name.rpartition(".")[0]
        return self.name if self.is_package or parent == ROOT else parent


@dataclass(frozen=True)
class Import:
    """One name, or a whole module, that a module imports from another one of the package, anywhere in its file."""

    importer: Module
    imported: Module
    name: str | None  # None: the module itself


@functools.cache
def modules() -> dict[str, Module]:
    """Return all modules of the package by their full name."""
    found = {}
    for path in sorted((SRC / ROOT).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, path, is_package, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return every import of one module of the package by another, those in functions and for types alone too."""
    return tuple(found for module in modules().values() for node in module.nodes for found in _imports_of(module, node))


def packages_imported(counts: Callable[[str, str], bool] = lambda _importer, _imported: True) -> dict[str, set[str]]:
    """Return the packages that each package imports, by those imports of modules that count.

    Subpackages are packages of their own.
    """
    graph: dict[str, set[str]] = {module.package: set() for module in modules().values()}
    for found in imports():
        pair = found.importer, found.imported
        if pair[0].package != pair[1].package and counts(pair[0].name, pair[1].name):
            graph[found.importer.package].add(found.imported.package)
    return graph


def _imports_of(module: Module, node: ast.AST) -> Iterator[Import]:
    known = modules()
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in known:
                yield Import(module, known[alias.name], None)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(module, node)
        for alias in node.names:
            if f"{base}.{alias.name}" in known:
                yield Import(module, known[f"{base}.{alias.name}"], None)
            elif base in known:
                yield Import(module, known[base], alias.name)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    above = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*above, *([node.module] if node.module else [])])
