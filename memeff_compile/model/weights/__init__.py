"""Functions for a model's weights: compress, decompress, save, load, update in the backward
pass."""
