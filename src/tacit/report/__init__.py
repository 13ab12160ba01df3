"""Records in, rows and one HTML page out. Nothing here imports torch."""

from tacit.report.model.summary import LINKS, TrainingRow, last_run, summarise, verdict, wire_time_s

__all__ = ["LINKS", "TrainingRow", "last_run", "summarise", "verdict", "wire_time_s"]
