"""A base for hooks that must not act on a copy of the module that carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class InertInCopies:
    """Have copies and pickles made without arguments, which every subclass takes to mean: do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
