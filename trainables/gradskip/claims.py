"""Parameters that optimizers have switched off, so that a later one on the same model can switch them on again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

#: The claim of the latest optimizer that was built on a parameter, or that stopped it.
_CLAIMS = WeakIdKeyDictionary()


class Claim:
    """The parameters that one optimizer's Gradient-Skip has switched off: it was not the user.

    Args:
        release: method that undoes what the optimizer does to modules; its object is weakly referenced.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._off = WeakIdKeyDictionary()
        self._release: weakref.WeakMethod[Any] = weakref.WeakMethod(release)

    def has(self, parameter: Tensor) -> bool:
        """Return whether this optimizer has switched the parameter off, and no other one has taken it since."""
        return parameter in self._off

    def add(self, parameter: Tensor) -> None:
        _CLAIMS[parameter] = self
        self._off[parameter] = True

    def take(self, parameters: Iterable[Tensor]) -> tuple[list[int], int]:
        """Take the parameters of an optimizer from earlier ones.

        Returns the indices of those that this one or an earlier one has switched off, and how many others the earlier
        ones leave switched off.
        """
        earlier: set[Claim] = set()
        taken_from: set[Claim] = set()
        taken = []
        for index, parameter in enumerate(parameters):
            known = _CLAIMS.get(parameter)
            if known is not None:
                earlier.add(known)
                if known._off.pop(parameter, False):
                    taken_from.add(known)
                    taken.append(index)
            _CLAIMS[parameter] = self
        for claim in taken_from:
            release = claim._release()
            if release is not None:
                release()
        return taken, sum(not p.requires_grad for claim in earlier - {self} for p in claim._off)
