"""Recognise layers with ternary weights in a graph."""
