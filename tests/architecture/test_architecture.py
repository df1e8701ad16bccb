"""Architecture of the package as tests: layers, cycles and names, read from the source without importing it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from offenders import assert_none

from tools.architecture import layers
from tools.architecture.__main__ import DIAGRAM, PAGE, page
from tools.architecture.diagram import draw, part_imports, reachable
from tools.architecture.source import Module, imports, modules, packages_imported

REPEATED_NAMES = {"metrics", "model", "__init__", "__main__"}  # each package has its own

DOCSTRING_OPENING = re.compile(r"(How|What|Who|Whom|Whose|Whether|Where|Why|With|Of|By|That)\b")
CONSTANT_NAME = re.compile(r"_?(MOST|LEAST|LONGEST|SHORTEST|LARGEST|SMALLEST|FEWEST|FEW)_[A-Z_]+")


def test_each_module_has_a_layer() -> None:
    """A new package, or a module at the top, gets its place in tools/architecture/layers.py."""
    sides = (layers.DAEMON_LAYERS, layers.CLIENT_LAYERS)
    assert_none(name for name in modules() if all(layers.layer_of(name, side) is None for side in sides))


def test_no_import_runs_upward() -> None:
    """Imports in functions count, and those for types alone."""
    assert_none(
        f"{found.importer.name} imports {found.imported.name}"
        for found in imports()
        if not layers.may_import(found.importer.name, found.imported.name)
    )


def test_no_cycle_of_packages() -> None:
    """Neither with subpackages as packages of their own, nor as parts of the one that they lie in.

    Imports that run upward are left out: they have a test, and the others can close a cycle in one layer only.
    """
    assert_none(
        f"{importer} imports {imported}"
        for graph in (packages_imported(layers.may_import), part_imports())
        for importer, all_imported in graph.items()
        for imported in all_imported
        if importer in reachable(graph, imported)
    )


def test_no_module_name_twice() -> None:
    """A module is found by its name, wherever it lies."""
    names = [(module.path.stem, module.name) for module in modules().values() if module.path.stem not in REPEATED_NAMES]
    assert_none(_repeated(names))


def test_no_public_class_name_twice() -> None:
    """A class is found by its name, wherever it is."""
    names = [
        (node.name, module.name)
        for module in modules().values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert_none(_repeated(names))


def test_no_private_name_leaves_its_package() -> None:
    """A name that another package needs is public."""
    assert_none(
        f"{found.importer.name} imports {found.imported.name}.{found.name}"
        for found in imports()
        if found.name and re.match(r"_(?!_)", found.name) and found.importer.package != found.imported.package
    )


def test_only_the_detector_evaluates_conditions() -> None:
    """A reader of conditions filters what the detector found: a second evaluation could disagree with the first."""
    readers = {found.importer.name for found in imports() if found.imported.name.startswith("gpuwarden.health")}
    users = {module.name for module in modules().values() if _uses_a_check(module.nodes)}
    # CHECKED are the conditions that have a check; the `check` of a problem of fitness is a name.
    others = {"gpuwarden.health.conditions", "gpuwarden.fitness.assessor"}
    assert users & readers == {"gpuwarden.health.detector", *others}


def _uses_a_check(nodes: list[ast.AST]) -> bool:
    """Return whether a check is called or passed on; to ask whether there is one is no use."""
    compared = {id(node.left) for node in nodes if isinstance(node, ast.Compare)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "check"
        and id(node) not in compared
        and not (isinstance(node.value, ast.Name | ast.Attribute) and ast.unparse(node.value).endswith("config"))
        for node in nodes
    )


def test_docstrings_open_with_the_thing_or_the_action() -> None:
    """A module or class is a thing, a function an action; neither is a question."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert_none(
        f"{module.name}{'.' if path else ''}{path}: {doc.splitlines()[0]}"
        for module in modules().values()
        for path, node in [("", module.tree), *_walk(module.tree)]
        if isinstance(node, documented) and (doc := ast.get_docstring(node)) and DOCSTRING_OPENING.match(doc)
    )


def test_constants_are_named_max_and_min() -> None:
    """Limits are found by MAX_, MIN_ and DEFAULT_."""
    assert_none(
        f"{module.name}.{name}"
        for module in modules().values()
        for name in _assigned(module)
        if CONSTANT_NAME.fullmatch(name)
    )


def _repeated(names: list[tuple[str, str]]) -> Iterator[str]:
    for name, group in itertools.groupby(sorted(names), key=lambda pair: pair[0]):
        places = [place for _, place in group]
        if len(places) > 1:
            yield f"{name} in {', '.join(places)}"


def _walk(node: ast.AST, path: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each class and function below a node with its path of names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = f"{path}.{child.name}".lstrip(".")
            yield own, child
            yield from _walk(child, own)
        else:
            yield from _walk(child, path)


def _assigned(module: Module) -> Iterator[str]:
    """Yield each name that a module assigns, at its top, in its classes and functions."""
    for node in module.nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_map_is_in_step() -> None:
    """Diagram and package table are those of the source; `make docs` writes them."""
    assert DIAGRAM.read_text(encoding="utf-8") == draw()
    assert PAGE.read_text(encoding="utf-8") == page()
