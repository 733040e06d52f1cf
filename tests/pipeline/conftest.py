from tiny import python_path, span_data, tiny_data, train_runs

__all__ = ["python_path", "span_data", "tiny_data", "train_runs"]
