"""Weights that live compressed: bf16 linears decoded when they are used."""
