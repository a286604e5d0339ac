"""Captured graphs held to eager's bits."""
