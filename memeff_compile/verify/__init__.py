"""In the first call of a rewritten graph, compare its results with those of the original graph."""
