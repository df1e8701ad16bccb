"""Lines of a source file that put something into a container, by the container's name. It is not a trace."""

from __future__ import annotations

import ast
import linecache
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

MAX_SOURCE_BYTES = 300_000  # parsing takes about 1 ms for each 10 kB
_GROWING = frozenset({"append", "appendleft", "add", "extend", "update", "insert", "setdefault", "put"})
_ENTRIES = frozenset({"setdefault", "get"})  # methods that return an entry
_NOTEBOOK_CELL = re.compile(r"^<ipython-input-|/ipykernel_\d+/")  # no files: linecache has their lines

Scope: TypeAlias = "int | str"  # the first line of a function, or the name of a class


def find_lines(file: str, name: str, within: Scope | None = None) -> list[int]:
    """Return the lines that add to the container `name`, else those that assign to it.

    Those within a scope come first, then those anywhere in the file. Empty for a file that cannot be read.
    """
    source = _read_source(file)
    if source is None:
        return []
    try:
        tree: ast.AST = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    scopes = [node for node in ast.walk(tree) if _begins(node, within)] if within is not None else []
    for collect in (_growing_lines, _assigned_lines):
        for scope in (*scopes, tree):
            if found := {line for node in ast.walk(scope) for line in collect(node, name)}:
                return sorted(found)
    return []


def _read_source(file: str) -> str | None:
    if cells := _NOTEBOOK_CELL.search(file) and linecache.getlines(file):
        return "".join(cells)
    try:
        if Path(file).stat().st_size > MAX_SOURCE_BYTES or not Path(file).is_file():
            return None
        with tokenize.open(file) as source:
            return source.read()
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None


def _begins(node: ast.AST, scope: Scope) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name == scope
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return scope in (node.lineno, *(each.lineno for each in node.decorator_list))  # co_firstlineno: the first decorator


def _growing_lines(node: ast.AST, name: str) -> Iterator[int]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWING:
        if _last_name(node.func.value) == name:
            yield node.lineno
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in _targets(node):
            in_place = isinstance(node, ast.AugAssign) or isinstance(target, ast.Subscript)
            if in_place and _last_name(target) == name:
                yield node.lineno


def _assigned_lines(node: ast.AST, name: str) -> Iterator[int]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and any(_last_name(each) == name for each in _targets(node)):
        yield node.lineno


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _last_name(node: ast.AST) -> str | None:
    """Return the last name of `history`, `self.history["loss"]` or `history.setdefault("loss", [])`."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ENTRIES:
            node = node.func.value
        else:
            break
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
