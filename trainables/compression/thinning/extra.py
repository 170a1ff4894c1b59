"""The package that thinning stands on, an optional extra."""

from __future__ import annotations

from importlib.util import find_spec

from trainables.errors import UserError


def check_installed() -> None:
    """Raise UserError where torch_pruning is not there; it is not imported, which takes a while."""
    try:
        missing = find_spec("torch_pruning") is None
    except ValueError:  # somebody has put nothing in its place
        missing = True
    if missing:
        raise UserError("thinning needs torch_pruning, which is not installed: pip install 'tune-cac[thin]'")
