"""A language model in one's own language, from scratch, in numbered steps; docs/architecture.md draws the rooms."""

__version__ = "1.0.0"
