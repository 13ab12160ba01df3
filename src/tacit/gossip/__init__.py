"""Ranks that exchange models in pairs, each when it likes: partners, the arithmetic of a meeting, and replicas in one process."""
