"""The command ``shim``: a package ``cac`` for scripts that import the published one."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from trainables.errors import UserError
from tune_cac.cli.command import argument, command

TEXT = '''"""The published package cac, here tune_cac's Gradient-Skip: written by `python -m tune_cac shim`."""

import sys

from tune_cac import gradskip
from tune_cac.gradskip import SGD

sys.modules["cac.gradskip"] = gradskip
'''


@command(
    argument("folder", metavar="DIR", help="folder of the script, or another one on its path"),
    help="let a script that imports the published package cac train with ours: write DIR/cac/__init__.py",
)
def run(arguments: argparse.Namespace) -> int:
    """Write the package; UserError where the published one can be imported, or a folder ``cac`` is there."""
    from tune_cac.cli.console import write_asked

    file = Path(arguments.folder) / "cac" / "__init__.py"
    if file.parent.exists() and not (file.is_file() and file.read_text() == TEXT):
        raise UserError(f"{file.parent} must not be there, or be of shim: choose another folder")
    found = importlib.util.find_spec("cac")
    if found is not None and found.origin is not None and Path(found.origin).read_text() != TEXT:
        raise UserError(
            f"the package cac must not be installed, got {found.origin}: with it such a script runs as it is, and "
            "without (pip uninstall cac) with ours"
        )
    if not Path(arguments.folder).is_dir():
        raise UserError(f"shim takes a folder that is there, got {arguments.folder}")
    file.parent.mkdir(exist_ok=True)
    write_asked(file, TEXT, "shim")
    print(f"Wrote {file}: import cac in {arguments.folder} is tune_cac's Gradient-Skip")
    return 0
