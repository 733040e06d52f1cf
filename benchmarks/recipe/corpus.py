"""The corpus of the contest, prepared once for all systems from the token files of step 2.

In: a configuration that names raw text, tokenizer and token files. Out, in a folder: the training and the held-out
documents as text and as token ids, and the tokenizer as `AutoTokenizer` reads it. Which documents are held out is what
step 2 says: a document of the raw text is held out if its ids stand in the validation file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recipe.contender import Corpus
from zerokara.base import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.documents import Document
from zerokara.corpus.find import find_files
from zerokara.corpus.read import ranges, read
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import IndexedTokens, TokenPaths

_BATCH = 256
"""Documents encoded at once."""


def prepare(config_path: Path, folder: Path, seq_len: int) -> Corpus:
    """Write the files of a corpus into `folder`, unless they are there already."""
    config = load(PretrainConfig, config_path)
    encoder = Encoder(config.input_tokenizer_file)
    paths = TokenPaths(config.output_prefix)
    outputs = manifest.read(paths.manifest).outputs
    made_of = sorted(record.sha256 for records in outputs.values() for record in records)
    identity = hashlib.sha256(" ".join([encoder.sha256, *made_of, str(seq_len)]).encode()).hexdigest()
    corpus = Corpus(
        config_path.stem, config_path.resolve(), folder.resolve(), Path(config.input_tokenizer_file).resolve(),
        encoder.vocab_size, encoder.model.id_of["bos"], encoder.eos_id, identity,
    )  # fmt: skip
    done = folder / "corpus.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8"))["sha256"] == corpus.sha256:
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    _write_texts(corpus, config, encoder, IndexedTokens(paths.valid))
    train = IndexedTokens(paths.train)
    np.save(corpus.train_ids, np.concatenate([train[number] for number in range(len(train))]).astype(np.int32))
    _write_tokenizer(corpus, encoder, seq_len)
    _check_tokenizer(corpus)
    done.write_text(json.dumps({key: str(value) for key, value in asdict(corpus).items()}), encoding="utf-8")
    return corpus


def _write_texts(corpus: Corpus, config: PretrainConfig, encoder: Encoder, valid: IndexedTokens) -> None:
    """Tell held-out documents from the others, and write both; a text that is in both splits is counted in each."""
    wanted = Counter(valid[number][:-1].astype(np.int32).tobytes() for number in range(len(valid)))
    with open(corpus.train_texts, "w", encoding="utf-8") as train, open(corpus.heldout, "w", encoding="utf-8") as held:
        for text, ids in _encoded(config, encoder):
            key = ids.tobytes()
            if wanted[key] > 0:
                wanted[key] -= 1
                print(json.dumps({"text": text, "ids": ids.tolist()}, ensure_ascii=False), file=held)
            elif len(ids):
                print(json.dumps({"text": text}, ensure_ascii=False), file=train)
    held_out = [json.loads(line)["text"] for line in corpus.heldout.read_text(encoding="utf-8").split("\n")[:-1]]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in held_out]
    corpus.heldout_texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if missing := wanted.total():
        raise SystemExit(f"{corpus.config}: {missing} held-out documents are not in the raw text; run step 2 again")


def _encoded(config: PretrainConfig, encoder: Encoder) -> Iterator[tuple[str, Any]]:
    """The documents of the raw text, and int32[tokens] of each."""
    batch: list[str] = []
    for text in _texts(config):
        batch.append(text)
        if len(batch) == _BATCH:
            yield from _pairs(batch, encoder)
            batch = []
    yield from _pairs(batch, encoder)


def _pairs(batch: list[str], encoder: Encoder) -> Iterator[tuple[str, Any]]:
    return zip(batch, (np.array(ids, dtype=np.int32) for ids in encoder.encode_many(batch)), strict=True)


def _texts(config: PretrainConfig) -> Iterator[str]:
    files = [*find_files(config.input_jsonl, config.where("input_jsonl"))]
    files += find_files(config.valid_jsonl, config.where("valid_jsonl")) if config.valid_jsonl else []
    for part in ranges(files, 1 << 62, config.txt_document):
        for item in read(part, config.text_field, config.txt_document):
            if isinstance(item, Document):
                yield item.text


def _write_tokenizer(corpus: Corpus, encoder: Encoder, seq_len: int) -> None:
    """Step 4's files; between documents that a script concatenates, a token must stand, and theirs is the first."""
    corpus.hf_tokenizer.mkdir(exist_ok=True)
    tokenizer_json.write(encoder, corpus.hf_tokenizer, seq_len)
    path = corpus.hf_tokenizer / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    begin = encoder.pieces[corpus.bos_id]
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": begin, "type_id": 0}})
    content["post_processor"]["special_tokens"] = {begin: {"id": begin, "ids": [corpus.bos_id], "tokens": [begin]}}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _check_tokenizer(corpus: Corpus) -> None:
    """The others' tokenizer gives the ids of the token files."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.hf_tokenizer / "tokenizer.json"))
    for line in corpus.heldout.read_text(encoding="utf-8").split("\n")[:-1]:
        document = json.loads(line)
        if tokenizer.encode(document["text"]).ids != [corpus.bos_id, *document["ids"]]:
            raise SystemExit(f"{corpus.name}: AutoTokenizer's ids differ from SentencePiece's")
