"""Arguments of the extensions, which remove what was pruned (thinning)."""

from __future__ import annotations

from typing import ClassVar, Literal

from trainables.compression.schedule.config_base import ComponentConfig, Count, Text


class _RemoverConfig(ComponentConfig):
    thinning_func_str: Literal["remove_filters", "remove_channels", "remove_structures"] | None = None
    """Published schedules have it; the class says it already."""
    arch: Text | None = None
    """Published schedules have it; the model at hand is thinned."""
    dataset: Text | None = None
    """Published schedules have it; a batch at hand is used."""
    round_to: Count = 1
    """Widths stay multiples of this (hardware likes 8)."""


class FilterRemoverConfig(_RemoverConfig):
    """Remove zero filters, and what depended on them."""

    class_: ClassVar[str] = "FilterRemover"


class ChannelRemoverConfig(_RemoverConfig):
    """Remove zero input channels, and what produced them."""

    class_: ClassVar[str] = "ChannelRemover"


class StructureRemoverConfig(_RemoverConfig):
    """Remove both."""

    class_: ClassVar[str] = "StructureRemover"


EXTENSIONS: dict[str, type[ComponentConfig]] = {
    model.class_: model for model in (FilterRemoverConfig, ChannelRemoverConfig, StructureRemoverConfig)
}
