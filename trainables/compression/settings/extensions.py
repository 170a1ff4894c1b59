"""Arguments of the extensions, which remove what was pruned (thinning)."""

from __future__ import annotations

from typing import ClassVar, Literal

from trainables.compression.settings.base import Count, Settings, Text


class _Remover(Settings):
    thinning_func_str: Literal["remove_filters", "remove_channels", "remove_structures"] | None = None
    """Published schedules have it; the class says it already."""
    arch: Text | None = None
    """Published schedules have it; the model at hand is thinned."""
    dataset: Text | None = None
    """Published schedules have it; a batch at hand is used."""
    round_to: Count = 1
    """Widths stay multiples of this (hardware likes 8)."""


class FilterRemover(_Remover):
    """Remove zero filters, and what depended on them."""

    class_: ClassVar[str] = "FilterRemover"


class ChannelRemover(_Remover):
    """Remove zero input channels, and what produced them."""

    class_: ClassVar[str] = "ChannelRemover"


class StructureRemover(_Remover):
    """Remove both."""

    class_: ClassVar[str] = "StructureRemover"


EXTENSIONS: dict[str, type[Settings]] = {
    model.class_: model for model in (FilterRemover, ChannelRemover, StructureRemover)
}
