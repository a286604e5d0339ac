"""Sums over whole sequences, for per-token losses."""
