from tiny import span_data, tiny_data

__all__ = ["span_data", "tiny_data"]
