"""Schedules, timelines and steps as pictures (matplotlib)."""
