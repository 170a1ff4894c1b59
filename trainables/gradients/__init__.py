"""Gradient estimators: directions of descent without backpropagation, or beside it.

    import tune_cac as cac
    estimate = cac.gradients.central_difference(lambda m: F.cross_entropy(m(x), y), model)

Importing this package loads no torch; a name's home is loaded when it is first asked for.
"""

from __future__ import annotations

from trainables.lazy_names import lazy_names

__all__: list[str] = []

__getattr__, __dir__ = lazy_names(__name__, {})
