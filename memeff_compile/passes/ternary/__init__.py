"""Recognize layers with ternary weights in a graph."""
