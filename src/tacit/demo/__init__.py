"""`tacit demo`: plain DDP and six strategies on real data, side by side on this machine."""
