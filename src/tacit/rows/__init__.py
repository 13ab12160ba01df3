"""Sparse tables: rows in shards, and the hot ones replicated and added in the network."""
