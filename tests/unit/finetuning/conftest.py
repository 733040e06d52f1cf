from toy_tokenizers import train_toy

__all__ = ["train_toy"]
