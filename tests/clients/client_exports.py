"""Exports of every family as step 4 writes them, and programs that run with another client's packages."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from configs import typed
from made_conversations import made_conversations
from made_runs import corpus_lines, make_run
from toy_tokenizers import trainer

from zerokara.examples.chat_template import ChatTemplate, auto_source
from zerokara.examples.formats import Message
from zerokara.huggingface.tokenizer_proof import tokenizer_of_exports
from zerokara.steps import convert_to_hf
from zerokara.tokenizer.compatibility import HARD_TEXTS
from zerokara.tokenizer.encoder import Encoder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".clients"
"""What run.sh installed, a folder for each lock."""
PROGRAMS = ROOT / "tests" / "clients" / "programs"
NUM_SENTINELS = 4
WIDE_T5 = {"optimizer": "adafactor", "head_dim": 12, "seq_len": 64}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "sentinels": {"extra_ids": NUM_SENTINELS},
}
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    # A base that is no class's default; Mixtral's is the default of all others.
    "llama": ("unigram", {"architecture": "llama", "num_kv_heads": 2, "rope_theta": 5000.0}),
    "llama-bpe": ("bpe", {"architecture": "llama", "num_kv_heads": 3, "rope_theta": 70000.0}),
    "qwen3": ("unigram", {"architecture": "qwen3", "num_kv_heads": 2, "rope_theta": 5000.0}),
    "qwen3-bpe": ("bpe", {"architecture": "qwen3", "num_kv_heads": 3, "rope_theta": 70000.0}),
    "gpt2": ("unigram", {"architecture": "gpt2", "tie_word_embeddings": True}),
    "mixtral": ("bpe", {"architecture": "mixtral", "num_kv_heads": 2, "rope_theta": 1e4, "num_experts": 4}),
    "qwen3_moe": (
        "unigram",
        {"architecture": "qwen3_moe", "num_kv_heads": 2, "rope_theta": 5000.0, "num_experts": 5, "moe_layers": (1,)},
    ),
    "t5": ("sentinels", {"architecture": "t5", **WIDE_T5}),
    "t5-tied": ("sentinels", {"architecture": "t5", "tie_word_embeddings": True, **WIDE_T5}),
    "switch": ("sentinels", {"architecture": "switch", "num_experts": 4, **WIDE_T5}),
}
DECODERS = [name for name, (tokenizer, _) in EXPORTS.items() if tokenizer != "sentinels"]


@dataclass(frozen=True)
class Exports:
    """Folders that step 4 wrote and proved, and what is asked about each."""

    folder: Path
    """Holds a folder for each name in `EXPORTS`, and nothing else."""
    questions: dict[str, Any]
    tokenizers: dict[str, Path]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def encoder(self, name: str) -> Encoder:
        """The tokenizer of an export as training uses it."""
        return Encoder(self.tokenizers[EXPORTS[name][0]])

    def segments(self, name: str, messages: Sequence[Message]) -> list[list[int]]:
        """The ids that training makes of a conversation: read, learned, read, …"""
        made = template_of(self.tokenizers[EXPORTS[name][0]]).encode(messages)
        return [segment.tolist() for segment in made]


@cache
def template_of(tokenizer: Path) -> ChatTemplate:
    encoder = Encoder(tokenizer)
    return ChatTemplate(auto_source(encoder), "auto", tokenizer_of_exports(encoder, False))


def joined(segments: Sequence[Sequence[int]]) -> list[int]:
    return [i for segment in segments for i in segment]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """All exports, made by step 4 from runs with wide random weights."""
    place = tmp_path_factory.mktemp("clients")
    train = trainer(tmp_path_factory, sentences(random.Random(1)))
    tokenizers = {kind: train(vocab_size=700, **settings) for kind, settings in TOKENIZERS.items()}
    folder = place / "exports"
    folder.mkdir()
    for name, (kind, settings) in EXPORTS.items():
        run = place / name
        run.mkdir()
        prompt = "the <extra_id_0> reads a corpus" if kind == "sentinels" else "the model reads"
        made = make_run(run, tokenizers[kind], **settings)
        if name in DECODERS:  # as step 7 leaves it, whatever the weights
            source = auto_source(Encoder(tokenizers[kind]))
            (made / "chat_template.jinja").write_text(source, encoding="utf-8")
        given = {"input_model_dir": made, "output_tokenizer_and_model_dir": folder / name}
        given |= {"dtype": "bf16", "check_lines": 100, "test_prompt_text": f"['{prompt}']"}
        assert convert_to_hf.main(["--config", "/dev/null", *typed(**given)]) == 0, name
    chance = random.Random(7)
    questions = {
        "lines": hard_lines(chance),
        "ids": [[chance.randrange(4, 300) for _ in range(40)] for _ in range(2)],
        "prompts": ["text until the end", "a corpus and the end of a document", "one"],
        "conversations": list(islice(made_conversations(Encoder(tokenizers["unigram"]), corpus_lines(40)), 40)),
        "sentinels": [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)],
    }
    return Exports(folder, questions, tokenizers)


def sentences(chance: random.Random) -> list[str]:
    """Text to train a tokenizer on: words of three scripts, so that pieces of several characters come about."""
    alphabets = ("etaoinshrdlu", "のはがをにとで今日天気", "오늘날씨가좋아서")
    words = ["".join(chance.choices(chance.choice(alphabets), k=chance.randint(2, 6))) for _ in range(400)]
    return [" ".join(chance.choices([*words, *corpus_lines(20)], k=12)) for _ in range(400)]


def hard_lines(chance: random.Random) -> list[str]:
    """Two hundred and more texts on which two tokenizers are most likely to differ."""
    words = " ".join(sentences(chance)[:20]).split()
    parts = [" ", "  ", "\t", "へ", "-", "é", "日本", "🏳️‍🌈", "42", "\n", "</s>", "<0x41>", "▁", "\u3000"]
    pieces = [*words, *(len(words) // len(parts) + 1) * parts]  # a part is about as likely as a word
    return [*HARD_TEXTS, *("".join(chance.choices(pieces, k=chance.randint(1, 12))) for _ in range(190))]


def client(
    program: Path | str, packages: str, *arguments: Path | str, fails: bool = False, cwd: Path | None = None, **own: str
) -> str:
    """Run a program, one of `PROGRAMS` by its name, with packages of clients before our own; gives what it said.

    `packages` are names of folders in `PACKAGES`, with "+" between; none for our own alone. It must end well, or badly
    where it `fails`; it runs in the folder `cwd`, with `own` environment variables.
    """
    folders = [PACKAGES / name for name in packages.split("+") if name]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        pytest.fail(f"{' and '.join(missing)}: not there; run: bash tests/clients/run.sh")
    # Modules of a program's own lie beside it, where Python does not look by itself (PYTHONSAFEPATH).
    folders.append((PROGRAMS / program).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"} | own
    environment["CUDA_VISIBLE_DEVICES"] = ""
    starter = "node" if Path(program).suffix == ".mjs" else sys.executable
    command = [starter, str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def ask(program: str, packages: str, exports: Path, questions: dict[str, Any]) -> dict[str, Any]:
    """What a program says of an export, or of a folder of exports; it reads the questions and writes a file."""
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place, "questions.json"), Path(place, "answers.json")
        asked.write_text(json.dumps(questions), encoding="utf-8")
        client(program, packages, exports, asked, answered)
        return json.loads(answered.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def new(exports: Exports) -> dict[str, Any]:
    """What our own transformers says, which step 4 has proved."""
    answers = ask("with_transformers.py", "", exports.folder, exports.questions)
    assert answers["version"].startswith("5.")
    return answers


def changed_copy(export: Path, copy: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    """A broken twin: an export in which a JSON file was changed."""
    shutil.copytree(export, copy)
    values = json.loads((copy / file).read_text(encoding="utf-8"))
    change(values)
    (copy / file).write_text(json.dumps(values), encoding="utf-8")
