"""Text ↔ token ids: SentencePiece training, its report, the encoder, the Hugging Face tokenizer and its proof."""
