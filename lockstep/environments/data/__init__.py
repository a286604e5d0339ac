"""Data rows: where they come from, and problems made of them."""
