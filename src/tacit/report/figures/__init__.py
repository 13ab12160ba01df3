"""Figures as SVG text, drawn from the values of `tacit.report.model`."""
