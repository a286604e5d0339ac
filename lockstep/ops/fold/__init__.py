"""Sums over ranks and shards, in order."""
