"""Import hook that finds this project's `trainables`, `search_spaces` and `analysis` before modules of those names.

`tune_cac` depends on three packages with common names. A user's folder may contain another ``analysis.py``, and Python
looks there first. `install` adds a finder for these names before Python's own finders. The user's code still imports
the user's module: an import from a file in the same folder is left to Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

#: The packages that `tune_cac` depends on.
NAMES = ("analysis", "search_spaces", "trainables")
_HOME = Path(__file__).resolve().parent.parent


class OwnPackages(MetaPathFinder):
    """Find this project's packages before anything of the same name on ``sys.path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of `NAMES`; None for other modules, and for user code that has its own."""
        if fullname not in NAMES or _imported_beside_its_own(fullname):
            return None
        return PathFinder.find_spec(fullname, [str(_HOME)])


def install() -> None:
    """Put the finder first, once per process."""
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def check_own(names: Sequence[str] = NAMES) -> None:
    """Check that no user module was imported under these names.

    Raises:
        ImportError: one was imported; the message says what to do.
    """
    for name in names:
        module = sys.modules.get(name)
        if module is not None and not _is_own(module):
            raise ImportError(
                f"tune_cac has a package named {name}, but {_place(module)} was imported under that name: rename "
                "it, or "
                f"move it into a package of yours and import it from there",
                name=name,
            )


def _is_own(module: ModuleType) -> bool:
    return Path(_place(module)).is_relative_to(_HOME)


def _place(module: ModuleType) -> str:
    found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "") or module.__name__
    return str(found)


def _imported_beside_its_own(name: str) -> bool:
    """Return whether the importing file is a user's file with a module of this name in the same folder."""
    importer = _importer()
    if importer is None:
        return False
    folder = Path(importer).resolve().parent
    if folder.is_relative_to(_HOME / "tune_cac") or any(folder.is_relative_to(_HOME / own) for own in NAMES):
        return False
    return folder != _HOME and ((folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file())


def _importer() -> str | None:
    """Return the file of the importing code; None if it has none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__file__")
