"""Functions for a model's attention: calibration."""
