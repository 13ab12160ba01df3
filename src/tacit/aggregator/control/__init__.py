"""The control server of an aggregator: admits jobs, allocates slots, detects lost ranks; status, metrics and diagnosis."""
