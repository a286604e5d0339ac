"""Terms of whole sequences in a loss a token."""
