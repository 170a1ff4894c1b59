"""Arguments of the extensions, which remove pruned structures (thinning)."""

from __future__ import annotations

from typing import Literal

from trainables.compression.schedule.config_base import ComponentConfig, Count, Text


class _RemoverConfig(ComponentConfig):
    thinning_func_str: Literal["remove_filters", "remove_channels", "remove_structures"] | None = None
    """Accepted for published schedules and ignored; the class determines it."""
    arch: Text | None = None
    """Accepted for published schedules and ignored; the trained model is thinned."""
    dataset: Text | None = None
    """Accepted for published schedules and ignored; a training batch is used."""
    round_to: Count = 1
    """Widths stay multiples of this (8 is efficient on most hardware)."""


class FilterRemoverConfig(_RemoverConfig):
    """Remove zero filters and the weights that read them."""


class ChannelRemoverConfig(_RemoverConfig):
    """Remove zero input channels and the filters that produced them."""


class StructureRemoverConfig(_RemoverConfig):
    """Remove zero filters and zero input channels."""


EXTENSIONS: dict[str, type[ComponentConfig]] = {
    model.class_: model for model in (FilterRemoverConfig, ChannelRemoverConfig, StructureRemoverConfig)
}
