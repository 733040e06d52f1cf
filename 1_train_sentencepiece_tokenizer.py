"""Step 1: train the tokenizer; `python 1_train_sentencepiece_tokenizer.py --help` tells more."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "original_codes"))

from zerokara.steps.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(ROOT)
    from zerokara.steps.train_tokenizer import main

    sys.exit(main(sys.argv[1:]))
