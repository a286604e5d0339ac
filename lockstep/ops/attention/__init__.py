"""Causal attention, packed and paged, and flex attention."""
