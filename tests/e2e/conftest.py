"""The small workload, and one Ray for the searches of a file."""

from one_ray import one_ray as one_ray
from tiny_workload import tiny as tiny
