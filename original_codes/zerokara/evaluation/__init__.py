"""Evaluation of trained models: bits per byte and tasks, with intervals, beside baselines."""
