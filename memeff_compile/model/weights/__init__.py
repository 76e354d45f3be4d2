"""Functions that compress, decompress, save and load a model's weights, or update them during the
backward pass."""
