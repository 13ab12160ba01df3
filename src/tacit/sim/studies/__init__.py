"""Studies with the simulator: a paper's figures again, search for the fastest schedule, contests, sweeps."""
