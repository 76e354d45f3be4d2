"""Functions that change a model's attention: calibration of low-bit attention."""
