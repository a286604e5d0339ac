"""Checks captured graphs against eager, bit by bit."""
