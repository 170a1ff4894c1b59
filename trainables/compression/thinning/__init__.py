"""Thinning: removal of zero filters and channels, which makes a model smaller and faster."""

from trainables.compression.thinning.cutting import Record, Removed, crop, thin_again
from trainables.compression.thinning.removing import Kind, Left, Thinned, thin

__all__ = ["thin", "thin_again", "crop", "Thinned", "Left", "Record", "Removed", "Kind"]
