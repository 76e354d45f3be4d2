"""Functions for a model's weights: compress, decompress, save, load, and update in the backward
pass."""
