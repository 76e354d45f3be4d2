"""Functions for a model's attention: calibration of low bits."""
