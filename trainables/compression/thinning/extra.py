"""Check for torch_pruning, the optional dependency of thinning."""

from __future__ import annotations

from importlib.util import find_spec

from trainables.errors import UserError


def check_installed() -> None:
    """Raise UserError where torch_pruning is not installed; does not import it, which would be slow."""
    try:
        missing = find_spec("torch_pruning") is None
    except ValueError:  # sys.modules has an entry without a spec
        missing = True
    if missing:
        raise UserError("thinning needs torch_pruning, which is not installed: pip install 'tune-cac[thin]'")
