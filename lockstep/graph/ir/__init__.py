"""What a captured graph is, as text and as plain data, and what must hold of it."""
