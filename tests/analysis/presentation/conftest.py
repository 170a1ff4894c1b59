"""The small workload of the report's tests."""

from tiny_workload import tiny as tiny
