"""What the records of a run mean: runs, comparisons, trials, verdicts and table rows, as values."""
