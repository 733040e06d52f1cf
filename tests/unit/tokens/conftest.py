"""A small tokenizer and a small corpus, made in the process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import foreign_models
import numpy as np
import pytest

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import InputFile
from zerokara.tokens.quarantine import SourceTally, count_sources
from zerokara.tokens.shard_tasks import WHOLE, expected, input_streams
from zerokara.tokens.shards import Job, ShardResult, shard_path, write_shard
from zerokara.tokens.work_folder import RESULT

SENTENCE = "the sea ice melts in spring and 春 の 海 終日 のたり かな ¡olé! don't stop, <s> </s> ends here"


def texts(count: int, seed: int = 0) -> list[str]:
    random = Random(seed)

    def line() -> str:
        return " ".join(random.choices(SENTENCE.split(), k=random.randint(0, 12)))

    return [f"{i} " + "\n".join(line() for _ in range(random.randint(1, 40))) for i in range(count)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return foreign_models.train(path, {**foreign_models.STEP_1, "model_type": "unigram"}, texts(200), vocab_size=400)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """300 documents as JSON lines, and some bad lines among them."""
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts(300))]
    lines[50:50] = ["{broken", ""]
    lines[200:200] = ['{"text": ""}']
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path: Path, model_path: Path, corpus: Path) -> Callable[..., PretrainConfig]:
    def make(**settings: Any) -> PretrainConfig:
        values = {
            "input_jsonl": [str(corpus)],
            "input_tokenizer_file": str(model_path),
            "output_prefix": str(tmp_path / "out" / "tokens"),
            "num_workers": 1,
            "txt_document": "line",
        }
        return PretrainConfig(**(values | settings))

    return make


class OneIdADocument:
    """Stands in for a tokenizer where only the counts matter."""

    vocab_size, eos_id, start_id, unk_id = 1000, 2, -1, 0

    def encode_joined(self, texts: Sequence[str]) -> tuple[Any, list[int]]:
        return np.array([9, 2] * len(texts), dtype=np.int32), [len(text.encode()) for text in texts]


@pytest.fixture
def tally_of(tmp_path: Path) -> Callable[[Sequence[InputFile], int], SourceTally]:
    """What step 2 counts of the files of one source, cut into tasks of a size; in this process, and quickly."""

    def count(files: Sequence[InputFile], task_bytes: int) -> SourceTally:
        job, results = Job(OneIdADocument(), tmp_path, "text", "line"), dict[str, ShardResult]()
        for stream in input_streams(files, task_bytes, "line", WHOLE, {})[0]:
            for task in stream:
                result = write_shard(task, job)
                results[task.name] = RESULT.validate_json(shard_path(tmp_path, task.name, "json").read_bytes())
                assert results[task.name] == result
        tasks, missing = expected(files, task_bytes, "line", results)
        parts = [part for task in tasks for part in zip(task.ranges, results[task.name].ranges, strict=True)]
        (tally,) = count_sources(1, parts)
        assert not missing
        assert tally.documents_in == sum(result.documents for result in results.values()) + tally.skipped.total()
        return tally

    return count
