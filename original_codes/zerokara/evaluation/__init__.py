"""What models are worth: bits per byte, tasks, minimal pairs, with intervals and baselines beside."""
