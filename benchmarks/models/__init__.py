"""Whole models: training, prefill, decoding."""
