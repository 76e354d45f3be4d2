"""How attention, its masks and its caches are read in a graph."""
