"""Log-probabilities and sampling."""
