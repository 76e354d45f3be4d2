"""How a head and its loss are read in a graph, and how the op's call is written."""
