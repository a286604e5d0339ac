"""Captured graphs bound to memory, recorded and launched."""
