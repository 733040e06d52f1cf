from tiny import tiny_data

__all__ = ["tiny_data"]
