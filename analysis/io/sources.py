"""Recognition of what a path contains (study, Ray experiment, journal, Parquet file), and names for several paths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from analysis.io.journal import LINE_BEGIN
from analysis.io.layout import Layout
from analysis.io.ray_results import is_experiment
from trainables.errors import UserError

#: One path or several.
Paths: TypeAlias = "str | Path | Iterable[str | Path]"
Kind: TypeAlias = Literal["study", "ray", "journal", "parquet"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A path from which trials are read."""

    path: Path
    """Path as given."""
    kind: Kind
    """A study's folder, a Ray experiment's folder, an Optuna journal, or a Parquet file of trials."""

    @property
    def study(self) -> Path:
        """Return the path that gives its name: a folder itself, a file's study folder, else the file without suffix."""
        if self.kind in ("study", "ray"):
            return self.path.resolve()
        folder = self.path.resolve().parent
        return folder if Layout(folder).info.exists() else self.path.resolve().with_suffix("")


def sources(paths: Paths) -> list[Source]:
    """Return a source for each path.

    Raises:
        UserError: no path is given, or a path contains nothing that can be read.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise UserError("at least one path must be given: the folder of a study or of a Ray experiment, or a file")
    return [Source(path=Path(path), kind=recognise(Path(path))) for path in given]


def recognise(path: Path) -> Kind:
    """Determine what a path contains, by its contents and not by its name alone.

    Raises:
        UserError: it contains nothing that can be read.
    """
    if path.is_file():
        return _recognise_file(path)
    layout = Layout(path)
    if layout.info.exists() or layout.journal.exists() or layout.trials.exists():
        return "study"
    if is_experiment(path):
        return "ray"
    inside = [child.name for child in sorted(path.glob("*/")) if Layout(child).info.exists() or is_experiment(child)]
    if inside:
        names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        raise UserError(f"no study in {path}, but in folders of it: give one or a list of them ({names})")
    raise UserError(
        f"no study in {path}: give the folder that a search wrote (it holds {layout.info.name}), the folder of a Ray "
        "experiment, an Optuna journal or a trials.parquet"
    )


def _recognise_file(path: Path) -> Kind:
    try:
        with path.open("rb") as file:
            begin = file.read(len(LINE_BEGIN))
    except OSError:
        begin = b""  # decide by the name; the reader reports why the file cannot be read
    if path.suffix == ".parquet" or begin.startswith(b"PAR1"):
        return "parquet"
    if path.suffix == ".journal" or begin.startswith(LINE_BEGIN):
        return "journal"
    raise UserError(f"a file of trials must be an Optuna journal or a Parquet file, {path} is neither")


def distinct_names(found: list[Source]) -> list[str]:
    """Return a unique name for each source: its study's name, preceded by as many parent folders as needed.

    Raises:
        UserError: a study was given twice.
    """
    paths = [source.study for source in found]
    for source, path in zip(found, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"each study must be given once, got {source.path} twice: leave one out")
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        depth += 1
