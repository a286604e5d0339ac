"""Causal attention: packed and paged, native and flex."""
