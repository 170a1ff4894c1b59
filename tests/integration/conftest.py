"""One Ray for the searches of a file."""

from one_ray import one_ray as one_ray
