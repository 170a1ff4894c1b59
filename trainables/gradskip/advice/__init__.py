"""Warnings to the user, and the reasons for which a run can stop or has stopped nothing."""
