"""Verbs on a model's attention: calibration."""
