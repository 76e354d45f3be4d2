"""What every pass stands on: reading a graph, editing it, and running the passes in order."""
