"""Base class of all settings, and the types of their values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: A share of elements or structures; text and booleans are not accepted.
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
#: A number >= 0.
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
#: A number > 0.
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
#: An integer.
Whole = Annotated[int, Field(strict=True)]
#: An integer >= 1.
Count = Annotated[int, Field(strict=True, ge=1)]
#: A boolean.
Flag = Annotated[bool, Field(strict=True)]
#: Text that is not empty.
Text = Annotated[str, Field(strict=True, min_length=1)]


def _listed(given: object) -> object:
    return [given] if isinstance(given, str) else given


#: Parameter names or patterns, at least one; a single one may be given without a list.
Names = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(_listed)]


class ComponentConfig(BaseModel):
    """Checked arguments of one class of a schedule; unknown arguments are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_: ClassVar[str]
    """The class's name in a schedule: that of the model without ``Config``, unless the model sets another."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "class_" not in vars(cls):
            cls.class_ = cls.__name__.removesuffix("Config")
