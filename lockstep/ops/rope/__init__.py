"""Rotary position embedding, with the norm of queries and keys."""
