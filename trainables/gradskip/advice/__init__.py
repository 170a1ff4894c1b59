"""Warnings to the user, and reasons why a run can stop, or has stopped, nothing."""
