"""The browser, the small workload, and one Ray for the searches of a file."""

from browser import chromium as chromium
from one_ray import one_ray as one_ray
from tiny_workload import tiny as tiny
