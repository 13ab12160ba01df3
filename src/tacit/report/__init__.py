"""Records in, rows and one HTML page out. Nothing here imports torch."""

from tacit.report.summary import LINKS, Row, last_run, summarise, verdict, wire_time_s

__all__ = ["LINKS", "Row", "last_run", "summarise", "verdict", "wire_time_s"]
