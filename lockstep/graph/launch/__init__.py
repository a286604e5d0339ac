"""Binds captured graphs to memory, records and launches them."""
