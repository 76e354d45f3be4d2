"""Recognise a head and its loss in a graph, and insert the op's call."""
