"""Base classes of hooks that must not act on copies of their module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from typing import Self


class InertInCopies:
    """Base class whose copies and pickles are built without arguments; subclasses built so do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class OwnedHooks(InertInCopies):
    """Hooks that report to an object which they do not keep alive; they are removed once it was collected.

    Args:
        tell: method that they call; its object is weakly referenced.
    """

    def __init__(self, tell: Callable[..., None] | None = None) -> None:
        self._tell = None if tell is None else weakref.WeakMethod(tell)
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listener(self) -> Callable[..., None] | None:
        """Return the method to call; None, with all hooks removed, where there is none."""
        listener = None if self._tell is None else self._tell()
        if listener is None:
            self.remove()
        return listener
