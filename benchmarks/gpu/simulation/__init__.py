"""A training step on a GPU that is not there: `__main__.py` is the command."""
