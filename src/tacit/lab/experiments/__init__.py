"""Experiments in a lab: `experiment.py` reads a file, `session.py` runs it, and `jobs/` holds what can be run."""
