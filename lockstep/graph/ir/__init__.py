"""The captured graph: its records, its form as text, and the verifier."""
