"""Compare a rewritten graph with the original graph at its first call."""
