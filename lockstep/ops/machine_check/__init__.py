"""Checks whether this machine keeps the bitwise contract."""
