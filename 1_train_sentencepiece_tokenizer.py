#!/usr/bin/env python3
"""Step 1: train the tokenizer. Edit sentence_piece_config.yaml, then: python 1_train_sentencepiece_tokenizer.py"""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent
sys.path.insert(0, str(root / "original_codes"))

from zerokara.steps import environment  # noqa: E402

if __name__ == "__main__":
    environment.enter(root)
    from zerokara.steps import train_tokenizer

    sys.exit(train_tokenizer.main(sys.argv[1:]))
