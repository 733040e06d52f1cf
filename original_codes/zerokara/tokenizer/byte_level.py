"""A byte-level BPE tokenizer made from another one (`base_tokenizer`), for a model that starts from that one's weights.

Normaliser, pre-tokenizer, special tokens and chat template stay. The vocabulary is learnt anew, or stays too, and
`extend` pieces are added behind it: merges that go on where the old ones end, learnt on text as the old tokenizer
splits it, so that text uses them (continued BPE training: Purason et al., 2025, arXiv 2512.03989). Both are learnt
by the trainer of tokenizers (0.23). No merge makes the text of an added token, which no text may give.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, CharDelimiterSplit
from tokenizers.trainers import BpeTrainer

from zerokara.base.errors import UserError
from zerokara.base.progress import Progress
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer import CONFIG_NAME, ENDS_NAMES, JSON_NAME, KEPT_NAMES
from zerokara.tokenizer.hugging_face import HuggingFaceEncoder, open_file, tokenizer_file

_FIRST_CHARACTER = 0x10000
"""The character that stands for piece 0; from here on none is a surrogate."""
_BLOCK_BYTES = 1 << 20


def open_base(config: TokenizerConfig) -> HuggingFaceEncoder:
    """Open the base.

    Raises:
        UserError: it cannot be opened, is no byte-level BPE, or `vocab_size` leaves no room beside its special tokens.
    """
    path = tokenizer_file(Path(config.base_tokenizer))
    base = open_file(path)
    if not isinstance(base, HuggingFaceEncoder) or base.description != "Hugging Face BPE, byte-level":
        rule = f"must be a byte-level BPE, as of Llama 3, Qwen, SmolLM and OLMo 2: {path} is a {base.description}"
        remedy = "set it to '': new_embeddings (step 3) takes any tokenizer"
        raise UserError(config.fault("base_tokenizer", rule, remedy))
    fixed = len(ByteLevel.alphabet()) + len(base.added)
    if not config.extend and config.vocab_size <= fixed:
        rule = f"must be greater than the {fixed} bytes and special tokens of base_tokenizer"
        raise UserError(config.fault("vocab_size", rule, f"try {4 * fixed}", ["base_tokenizer"]))
    for token in base.added if base.algorithm.get("ignore_merges") else ():
        if len(base.vendor.pre_tokenizer.pre_tokenize_str(token["content"])) == 1:
            rule = f"cannot be {path}: a text with the word {token['content']} would give its added token"
            raise UserError(config.fault("base_tokenizer", rule, "name another"))
    return base


def train(config: TokenizerConfig, sentences: Path) -> dict[str, bytes]:
    """Learn from a file of text; return the files of the new tokenizer, by name.

    Raises:
        UserError: the text supports fewer pieces than asked for; names the largest number that works.
    """
    base = open_base(config)
    files = {name: content for name, content in base.folder_files.items() if name in KEPT_NAMES}
    settings = orjson.loads(files[JSON_NAME])
    with Progress("reading the sample", total=sentences.stat().st_size, unit="B") as progress:
        blocks = _blocks(sentences, progress)
        vocabulary, merges = (_extended if config.extend else _anew)(config, base, blocks)
    added = {token["content"] for token in base.added}
    kept = [[left, right] for left, right in merges if left + right not in added]
    settings["model"] = base.algorithm | {"vocab": vocabulary, "merges": kept}
    ids = dict(vocabulary)
    for token in settings.get("added_tokens") or []:
        token["id"] = ids.setdefault(token["content"], len(ids))
    _renumber(settings.get("post_processor") or {}, ids)
    files[JSON_NAME] = orjson.dumps(settings, option=orjson.OPT_INDENT_2)
    if ends := {ids[base.pieces[i]] for i in base.named("eos", ENDS_NAMES)}:  # so that step 2 asks which of several
        files[ENDS_NAMES[0]] = orjson.dumps({"eos_token_id": sorted(ends)})
    if CONFIG_NAME in files:
        config_json = orjson.loads(files[CONFIG_NAME])
        described = config_json.get("added_tokens_decoder", {}).values()
        config_json |= {"added_tokens_decoder": {str(ids[each["content"]]): each for each in described}}
        files[CONFIG_NAME] = orjson.dumps(config_json, option=orjson.OPT_INDENT_2)
    return files


def _blocks(sentences: Path, progress: Progress) -> Iterator[str]:
    with open(sentences, encoding="utf-8", newline="\n") as file:
        while lines := file.readlines(_BLOCK_BYTES):
            progress.advance(sum(len(line.encode()) for line in lines))
            yield "".join(lines)


_Learnt = tuple[dict[str, int], list[list[str]]]


def _anew(config: TokenizerConfig, base: HuggingFaceEncoder, blocks: Iterable[str]) -> _Learnt:
    """Return ids by piece, without those of added tokens, which come behind them, and the merges."""
    vendor = Tokenizer(BPE())
    vendor.normalizer, vendor.pre_tokenizer = base.vendor.normalizer, base.vendor.pre_tokenizer
    num_pieces = config.vocab_size - len(base.added)
    model = _learn(vendor, blocks, num_pieces, initial_alphabet=ByteLevel.alphabet())
    if (learnt := len(model["vocab"])) < num_pieces:
        largest = learnt + len(base.added)
        rule = f"is larger than the sample supports; the largest that works is {largest}"
        raise UserError(config.fault("vocab_size", rule, f"set {largest} or less, or train on more text"))
    return model["vocab"], model["merges"]


def _extended(config: TokenizerConfig, base: HuggingFaceEncoder, blocks: Iterable[str]) -> _Learnt:
    """Return the base's ids and merges, with the new ones behind them.

    The trainer is given text in which every character stands for a piece of the base, and a line for one of its words.
    """
    normalizer, splitter, spelt = base.vendor.normalizer, base.vendor.pre_tokenizer, dict[str, str]()

    def words(text: str) -> Iterator[str]:
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text):
            if word not in spelt:
                tokens = base.vendor.model.tokenize(word)
                spelt[word] = "".join(chr(_FIRST_CHARACTER + token.id) for token in tokens)
            yield spelt[word]

    texts = ["\n".join(words(text)) for text in blocks]
    vendor = Tokenizer(BPE())
    vendor.pre_tokenizer = CharDelimiterSplit("\n")
    alphabet = len({character for word in spelt.values() for character in word})
    # Two ways to one new text are two merges to the trainer, and one piece here: so that it is asked for some more.
    learnt = _learn(vendor, texts, alphabet + config.extend + config.extend // 10 + 100)["merges"]
    model = base.algorithm
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in base.added}
    merges = [each if isinstance(each, list) else each.split(" ") for each in model["merges"]]
    free = iter(range(len(base.pieces), len(base.pieces) + config.extend))
    for pair in learnt:
        left, right = ("".join(base.pieces[ord(mark) - _FIRST_CHARACTER] for mark in half) for half in pair)
        if left + right not in vocabulary:
            if (number := next(free, None)) is None:
                break
            vocabulary[left + right] = number
        merges.append([left, right])
    if left_over := len([*free]):
        largest = config.extend - left_over
        rule = f"is more than the sample supports; the most that works is {largest}"
        raise UserError(config.fault("extend", rule, f"set {largest} or less, or train on more text"))
    return vocabulary, merges


def _learn(vendor: Tokenizer, texts: Iterable[str], vocab_size: int, **options: Any) -> dict[str, Any]:
    trainer = BpeTrainer(vocab_size=vocab_size, show_progress=sys.stderr.isatty(), **options)
    vendor.train_from_iterator(texts, trainer)
    model: dict[str, Any] = orjson.loads(vendor.to_str())["model"]
    return model


def _renumber(post_processor: dict[str, Any], vocabulary: dict[str, int]) -> None:
    """Give the tokens that a post-processor adds their ids."""
    for each in post_processor.get("processors", [post_processor]):
        for token in each.get("special_tokens", {}).values():  # TemplateProcessing
            token["ids"] = [vocabulary[name] for name in token["tokens"]]
        for key in {"sep", "cls"} & {*each}:  # BertProcessing, RobertaProcessing
            each[key] = [each[key][0], vocabulary[each[key][0]]]
