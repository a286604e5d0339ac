"""How several ranks sample, and share what they sampled."""
