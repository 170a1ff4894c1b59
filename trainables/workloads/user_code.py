"""Import of a user's module as their script would import it, and a digest that changes with its source.

`package.module:function` is imported from installed packages or from the working directory. Modules that it imports
from its own folder belong to it: a change there changes the training.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainables.errors import UserError, unknown_name

T = TypeVar("T")
#: This project's packages, which a user's training cannot hide in its process (`tune_cac.own_packages.NAMES`).
OWN_PACKAGES = ("analysis", "search_spaces", "trainables")
#: Most files that are read; the digest of a larger project depends only on these.
_MOST_FILES = 500


def import_attribute(reference: str, what: str) -> Any:
    """Import what ``package.module:name`` refers to, also from the working directory, as ``python -m`` does.

    Args:
        reference: ``package.module:name``.
        what: its name in messages.

    Raises:
        UserError: no such module or name, or the module raised when it was imported.
    """
    module_name, _, name = reference.partition(":")
    module = _module(module_name, what, reference)
    if not hasattr(module, name):
        error = unknown_name(f"name in {module_name}", name, [n for n in vars(module) if not n.startswith("_")])
        raise UserError(f"{what} {reference}: {error}")
    return getattr(module, name)


def import_function(reference: str, what: str) -> Callable[..., Any]:
    """Import a function or class, as `import_attribute`; UserError for anything that cannot be called."""
    found: Callable[..., Any] = import_attribute(reference, what)
    if not callable(found):
        raise UserError(f"{what} {reference} must be a function, got {type(found).__name__}")
    return found


def class_named(name: str, classes: Mapping[str, type[T]], what: str, base: type[T]) -> type[T]:
    """Return one of the classes by its name, or the user's own by ``package.module:Class``.

    Raises:
        UserError: there is none, or it is no subclass of ``base``.
    """
    if ":" not in name:
        if name not in classes:
            raise unknown_name(what, name, classes)
        return classes[name]
    found = import_attribute(name, what)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{what} {name} must be a subclass of {base.__module__}.{base.__name__}")
    return found


def _module(module_name: str, what: str, reference: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # pip's console script has its own folder there instead
        importlib.invalidate_caches()
    _check_names(module_name, what, reference)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        said = f"importing {module_name} failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            said = f"importing {module_name} failed: {error}"
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                said = f"there is no module {error.name}, neither installed nor in {os.getcwd()}: give "
                said += "package.module:function"
        raise UserError(f"{what} {reference}: {said}") from error


def _check_names(module_name: str, what: str, reference: str) -> None:
    """Raise UserError where the user's training imports its own module under the name of one of our packages."""
    top = module_name.partition(".")[0]
    root = Path.cwd() if top in OWN_PACKAGES else _root_of(top)
    if root is None or _is_installed(root) or root == Path(__file__).resolve().parents[2]:
        return
    for path in sorted(_reached(root, [top])):
        for name in {top, *_imported(path)} & set(OWN_PACKAGES):
            own = next(_sources(root, name), None)
            if own is not None:
                raise UserError(
                    f"{what} {reference}: {own.relative_to(root)} has the name of a package of tune_cac, {name}, so "
                    f"{path.relative_to(root)} cannot import it: rename it, or move it into a package of yours"
                )


def code_digest(module_name: str) -> str:
    """Return a digest of the source of the module and of its imports from its own folder, loaded or not."""
    digest = hashlib.sha256()
    for path in sorted(_files(module_name)):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def beside(script: Path) -> set[Path]:
    """Return the sources that a script imports from its own folder, directly or indirectly."""
    return _reached(script.parent, list(_imported(script))) if script.suffix == ".py" else set()


def module_sources(root: Path, module_name: str) -> set[Path]:
    """Return the sources under a folder of a module's top-level package and of its imports from that folder."""
    return _reached(root, [module_name.partition(".")[0]])


def own_modules(module_name: str) -> list[Path]:
    """Return the top-level modules (files, package folders) that another machine needs for it; none if installed."""
    root = _root_of(module_name.partition(".")[0])
    if root is None or _is_installed(root):
        return []
    tops = {path.relative_to(root).parts[0] for path in _files(module_name)}
    return [root / top for top in sorted(tops)]


def _files(module_name: str) -> set[Path]:
    root = _root_of(module_name.partition(".")[0])
    return set() if root is None else module_sources(root, module_name)


def _reached(root: Path, names: list[str]) -> set[Path]:
    """Return the sources, under a folder, of the named top-level modules and of their imports from there."""
    found: set[Path] = set()
    seen: set[str] = set()
    remaining = list(names)
    while remaining and len(found) < _MOST_FILES:
        name = remaining.pop()
        if name in seen:
            continue
        seen.add(name)
        for path in _sources(root, name):
            found.add(path)
            remaining += _imported(path)
    return found


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or "dist-packages" in path.parts


def _root_of(top: str) -> Path | None:
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return Path(places[0]).parent if places else None


def _sources(root: Path, name: str) -> Iterator[Path]:
    if (root / f"{name}.py").is_file():
        yield root / f"{name}.py"
    elif (root / name).is_dir():
        yield from (root / name).rglob("*.py")


def _imported(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports anywhere; none for an installed file, which is not the user's."""
    if _is_installed(path):
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
