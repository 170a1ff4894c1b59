"""Have `trainables`, `search_spaces` and `analysis` mean this project's packages wherever our own code imports them.

`tune_cac` stands on three packages with everyday names. A user's folder may hold an ``analysis.py`` of its own, and
Python looks there first. `install` puts a finder before Python's own that answers for these names where our code
imports; every other import is left to Python. It also finds the aliases, such as ``tune_cac.analysis``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

#: The packages that `tune_cac` stands on.
NAMES = ("analysis", "search_spaces", "trainables")
#: Packages with a name in `tune_cac` too, so that a user needs one import.
ALIASES = {
    "analysis": "analysis",
    "compression": "trainables.compression",
    "gradients": "trainables.gradients",
    "gradskip": "trainables.gradskip",
    "search_spaces": "search_spaces",
}
_HOME = Path(__file__).resolve().parent.parent
_OURS = tuple(_HOME / name for name in ("tune_cac", *NAMES))


class OwnPackages(MetaPathFinder):
    """Find this project's packages for our own code, and the aliases for everybody."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of `NAMES` that our code imports, or of an alias; None for everything else."""
        if fullname in NAMES:
            return PathFinder.find_spec(fullname, [str(_HOME)]) if _our_code_imports() else None
        package, _, rest = fullname.partition(".")
        head, _, tail = rest.partition(".")
        if package == "tune_cac" and head in ALIASES:
            return ModuleSpec(fullname, _AliasLoader(f"{ALIASES[head]}.{tail}".rstrip(".")))
        return None


class _AliasLoader(Loader):
    """Give a module that has a name already another one."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its own name."""
        check_own([self._home.partition(".")[0]])
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module's own spec: it was executed under its own name."""
        module.__spec__ = self._spec


def install() -> None:
    """Put the finder first, once a process."""
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def check_own(names: Sequence[str] = NAMES) -> None:
    """Check that no module of the user's was imported under these names.

    Raises:
        ImportError: one was; says what to do.
    """
    for name in names:
        module = sys.modules.get(name)
        if module is not None and not _is_ours(_place(module)):
            raise ImportError(
                f"tune_cac has a package named {name}, but {_place(module)} was imported under that name: rename it, "
                "or move it into a package of yours and import it from there",
                name=name,
            )


def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(package) for package in _OURS)


def _place(module: ModuleType) -> str:
    found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "") or module.__name__
    return str(found)


def _our_code_imports() -> bool:
    """Return whether the import comes from one of our files; importlib's own frames are skipped."""
    skipped = ("<frozen importlib", importlib.__file__, __file__)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame is not None and _is_ours(frame.f_code.co_filename)
