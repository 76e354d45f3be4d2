"""Calibration: choose a low-bit format, or `exact`, for each attention call of a model.

The choice is based on measurements with the user's inputs. Calibration does not change the model.
"""
