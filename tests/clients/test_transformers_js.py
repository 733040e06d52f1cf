"""transformers.js reads an export whose tokenizer is BPE as training did; of unigram it does not know the bytes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from client_exports import PACKAGES, PROGRAMS, Exports

PACKAGE = PACKAGES / "transformers.js" / "node_modules" / "@huggingface" / "tokenizers"


def differing_lines(exports: Exports, place: Path, name: str) -> int:
    asked, answered = place / "questions.json", place / "answers.json"
    asked.write_text(json.dumps(exports.questions), encoding="utf-8")
    command = ["node", PROGRAMS / "with_transformers_js.mjs", PACKAGE, exports[name], asked, answered]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(answered.read_text(encoding="utf-8"))
    encoder, lines = exports.encoder(name), exports.questions["lines"]
    assert found["version"] == "0.2.0" and len(found["ids"]) == len(lines) >= 200
    # It has no way to read the name of a control token as text, which `</s>` in these lines is: those are left out.
    pairs = zip(lines, found["ids"], strict=True)
    return sum(ids != encoder.encode(line).tolist() for line, ids in pairs if not names_control_token(exports, line))


def names_control_token(exports: Exports, line: str) -> bool:
    encoder = exports.encoder("llama-bpe")
    return any(encoder.piece(token) in line for token in (*encoder.control_ids, encoder.unk_id))


def test_ids_of_bpe_are_those_of_training(exports: Exports, tmp_path: Path) -> None:
    plain = [line for line in exports.questions["lines"] if not names_control_token(exports, line)]
    assert len(plain) > 100
    assert differing_lines(exports, tmp_path, "llama-bpe") == 0


def test_ids_of_unigram_are_others_as_readme_says(exports: Exports, tmp_path: Path) -> None:
    """It gives <unk> for what has no piece, instead of bytes. Where this fails README can promise more."""
    assert differing_lines(exports, tmp_path, "llama") > 0
