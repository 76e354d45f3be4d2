"""Recognize attention, attention masks and KV caches in a graph."""
