"""Functions that make the weights of a model's linear layers ternary (-1, 0 or 1), or pack ternary
weights."""
