from toy_tokenizers import toy, toy_bpe, train_toy

__all__ = ["toy", "toy_bpe", "train_toy"]
