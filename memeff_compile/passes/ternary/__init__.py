"""How layers with ternary weights are read in a graph."""
