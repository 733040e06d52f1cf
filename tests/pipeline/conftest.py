from tiny import python_path, span_data, tiny_data, train_runs
from warm import warm_python, warm_server

__all__ = ["python_path", "span_data", "tiny_data", "train_runs", "warm_python", "warm_server"]
