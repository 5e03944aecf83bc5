"""Admission, groups and staleness: which work is issued when, and what the learner may take."""

from estr.schedule.schedule import Group, Schedule, ScheduleRules, Ticket, Waiting

__all__ = ["Group", "Schedule", "ScheduleRules", "Ticket", "Waiting"]
