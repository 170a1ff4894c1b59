"""Compression schedules as YAML: reading, checking, writing, and ranges to search. Does not import torch."""

from trainables.compression.schedule.epoch_table import EpochRow, epoch_table, planned_share, table_cells
from trainables.compression.schedule.matching import ModelFacts, Resolved, resolve
from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule
from trainables.compression.schedule.policy_configs import PrunerPolicyConfig, RegularizerPolicyConfig, ScheduleError
from trainables.compression.schedule.reading import Mark, MarkedSchedule, dump, read_marks, read_schedule, to_mapping

__all__ = [
    "Component", "Mark", "MarkedSchedule", "ModelFacts", "PlannedPolicy", "PrunerPolicyConfig",
    "RegularizerPolicyConfig", "Resolved", "EpochRow", "Schedule", "ScheduleError", "dump", "epoch_table",
    "planned_share", "read_marks", "read_schedule", "resolve", "table_cells", "to_mapping",
]  # fmt: skip
