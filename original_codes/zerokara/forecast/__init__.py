"""Compute planning: the speed of a machine, a scaling law from small runs, and a table of model sizes."""
