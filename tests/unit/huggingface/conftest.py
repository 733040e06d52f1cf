from tiny import tiny_data
from toy_tokenizers import train_toy

__all__ = ["tiny_data", "train_toy"]
