"""Compare the first call of a rewritten graph with the original graph."""
