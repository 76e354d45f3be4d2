"""Functions that make a model's linears ternary, or pack ternary weights."""
