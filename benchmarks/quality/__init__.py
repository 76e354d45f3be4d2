"""What lossy modes do to real trained models: any folder of weights, texts that are at hand."""
