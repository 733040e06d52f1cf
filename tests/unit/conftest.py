from tiny import span_data, tiny_data
from toy_tokenizers import toy, toy_bpe, train_toy

__all__ = ["span_data", "tiny_data", "toy", "toy_bpe", "train_toy"]
