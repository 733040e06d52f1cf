"""Step 6: the exported model → the Hugging Face Hub; `python 6_upload.py --help` tells more."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "original_codes"))

from zerokara.steps.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(ROOT)
    from zerokara.steps.upload import main

    sys.exit(main(sys.argv[1:]))
