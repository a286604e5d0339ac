"""Data rows: their sources, and problems made from them."""
