"""What a trained model can do, measured so that it can be believed: numbers with intervals, beside baselines."""
