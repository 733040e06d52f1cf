from tiny import gap_data, python_path, tiny_data, train_runs

__all__ = ["gap_data", "python_path", "tiny_data", "train_runs"]
