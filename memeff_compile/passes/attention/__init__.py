"""Recognize attention, its masks and its caches in a graph."""
