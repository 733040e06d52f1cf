from tiny import python_path, tiny_data, train_runs

__all__ = ["python_path", "tiny_data", "train_runs"]
