"""Recognize an output projection and its loss in a graph, and insert a call of the fused op."""
