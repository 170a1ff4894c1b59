"""The browser and the small workload of the report's tests."""

from browser import chromium as chromium
from tiny_workload import tiny as tiny
