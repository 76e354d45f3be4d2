"""Reads a head and its loss in a graph, and writes the op's call."""
