"""Small all-gathers and all-to-alls in which the ranks of one host store directly into one another's memory."""
