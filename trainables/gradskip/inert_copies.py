"""Base class of hooks that must not act on copies of their module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class InertInCopies:
    """Base class whose copies and pickles are built without arguments; subclasses built so do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
