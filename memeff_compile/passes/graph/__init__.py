"""The base of every pass: reading a graph, editing it, and running the passes in order."""
