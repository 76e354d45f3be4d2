"""The commands of ``python -m memeff_compile``."""
