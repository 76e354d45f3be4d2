"""Effects of lossy modes on real trained models: any folder of weights, and texts found on the
machine.
"""
