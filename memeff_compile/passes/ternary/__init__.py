"""Recognize linear layers with ternary weights (-1, 0 or 1) in a graph."""
