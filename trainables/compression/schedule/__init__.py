"""Compression schedules as YAML: reading, checking, writing, and ranges to search. Does not import torch."""

from trainables.compression.schedule.document import ScheduleError
from trainables.compression.schedule.matching import ModelFacts, Resolved, resolve
from trainables.compression.schedule.parts import PlannedPolicy, PrunerPolicyConfig, RegularizerPolicyConfig, Schedule
from trainables.compression.schedule.reading import Mark, MarkedSchedule, dump, read_marks, read_schedule, to_mapping

__all__ = [
    "Mark", "MarkedSchedule", "ModelFacts", "PlannedPolicy", "PrunerPolicyConfig", "RegularizerPolicyConfig",
    "Resolved", "Schedule", "ScheduleError", "dump", "read_marks", "read_schedule", "resolve", "to_mapping",
]  # fmt: skip
