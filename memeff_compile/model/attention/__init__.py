"""Calibration: choose a low-bit format, or `exact`, for each attention call of a model.

With a low-bit format, attention quantises queries and keys to integers of 4 or 8 bits. With
`exact`, the call stays the model's usual attention. The choice is based on measurements with the
user's inputs.
Calibration does not change the model.
"""
