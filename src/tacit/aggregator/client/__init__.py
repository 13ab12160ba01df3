"""What a rank uses of an aggregator: the host stack, which sends vectors and receives sums, and the client end of control."""
