"""The option ``--lengths``: shares of the full run that dense runs are cut to. Loads neither torch nor ray."""

from __future__ import annotations

from trainables.errors import UserError

#: The value that lets the search choose the lengths by what they show.
AUTO_LENGTHS = "auto"


def read_lengths(text: str) -> tuple[float, ...]:
    """Return the shares of a text such as ``1.0,0.8,0.6``.

    Raises:
        UserError: it is no such text, or a share is not in (0, 1].
    """
    try:
        found = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < share <= 1 for share in found):
        raise UserError(
            f"--lengths must be {AUTO_LENGTHS} or shares of the full run in (0, 1], such as 1.0,0.8,0.6 (1.0 alone: "
            f"only runs of full length), got {text!r}"
        )
    return found
