from tiny import tiny_data
from toy_tokenizers import toy, toy_bpe, train_toy

__all__ = ["tiny_data", "toy", "toy_bpe", "train_toy"]
