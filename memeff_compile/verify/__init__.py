"""The first call of a rewritten graph, held against the original."""
