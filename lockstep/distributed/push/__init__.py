"""Words that ranks of one host store straight into one another's memory, in place of a collective of small messages."""
