"""Token files of random words, made on the spot: ``python -m benchmarks.gpu.data FOLDER WORDS DOCUMENTS``.

A tokenizer with a piece for each of so many words, and documents of a thousand of them, tokenized by step 2 itself.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Command line."""
    folder, num_words, num_documents = sys.argv[1:]
    make_data(Path(folder), int(num_words), int(num_documents))


def make_data(folder: Path, num_words: int, num_documents: int) -> None:
    """Make tokenizer and token files; the folder may be missing."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as messages

    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    words = sorted({"".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(num_words)})
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(words[:2000]), model_prefix=str(folder / "small"), vocab_size=400, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=3, add_dummy_prefix=False, remove_extra_whitespaces=False,
        user_defined_symbols=["\n"], normalization_rule_name="identity", minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    model = messages.ModelProto()
    model.ParseFromString((folder / "small.model").read_bytes())
    for word in words:
        model.pieces.add(piece=f"\u2581{word}", score=-1.0, type=messages.ModelProto.SentencePiece.NORMAL)
    for number in reversed(range(100)):
        model.pieces.add(piece=f"<extra_id_{number}>", score=0.0, type=messages.ModelProto.SentencePiece.CONTROL)
        model.trainer_spec.control_symbols.append(f"<extra_id_{number}>")
    model.trainer_spec.vocab_size = len(model.pieces)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString(deterministic=True))
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for _ in range(num_documents):
            file.write(json.dumps({"text": " " + " ".join(chance.choices(words, k=1000))}) + "\n")
    command = [sys.executable, "-m", "zerokara.steps", "tokenize", *as_options(data_settings(folder))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def data_settings(folder: Path) -> list[str]:
    """The settings of step 2, which step 3 has too."""
    return [
        f"input_jsonl=[{folder}/corpus.jsonl]",
        f"input_tokenizer_file={folder}/tokenizer.model",
        f"output_prefix={folder}/tokens",
        "valid_min_documents=1",
    ]


def as_options(settings: list[str]) -> list[str]:
    """As the command line has them."""
    return ["--config", "/dev/null", *(part for setting in settings for part in ("--set", setting))]


if __name__ == "__main__":
    main()
