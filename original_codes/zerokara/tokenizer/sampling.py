"""Corpus files → a file with one training sentence per line, and texts of each source to measure the tokenizer with.

How much text is taken follows from `sample_bytes` and the free memory (`plan`). SentencePiece 0.2.3 takes most where it
looks for candidates (unigram: arrays over the bytes of the text) or counts pairs (bpe: the distinct words, of which a
language without spaces has most). `PEAK_BYTES` is above the highest peak measured on 14 bodies of text, 5 to 60 MB of
Japanese, Korean and European languages. With `base_tokenizer` (tokenizers 0.23, 10 and 20 MB of Japanese and Romanian)
the base itself, of 150,000 pieces, comes to it.

Documents are offered as *passages*: whole, or split at line ends where longer than `PASSAGE_BYTES`. Each gets a random
key from the seed; those with the smallest keys stay while they fit the budget (reservoir sampling): a uniform sample
that depends only on corpus, budget and seed, in memory of the size of the budget. Chosen passages are split at line
ends, and at sentence ends where a line is longer than SentencePiece accepts; only the characters that SentencePiece
reserves for itself are dropped.
"""

import heapq
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerokara.base.errors import UserError, refuse
from zerokara.base.progress import bytes_text, plural
from zerokara.base.resources import available_memory
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.documents import HARMLESS, Document
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import gathered, read_files, total_plain_bytes
from zerokara.corpus.tally import ReadTally, faults_of
from zerokara.tokenizer.model_file import SPACE_MARK

PROCESS_BYTES, BASE_TOKENIZER_BYTES = 40_000_000, 750_000_000
"""Memory of the training process without any text, and with a `base_tokenizer`."""
PEAK_BYTES = {"unigram": 24, "unigram of morphemes": 34, "bpe": 50, "bpe of morphemes": 18, "base": 100, "extend": 45}
"""Bytes of memory for each byte of text, at most."""
AUTO_SHARE, SAFE_SHARE = 0.5, 0.8
"""Share of the free memory that `auto` may use, and share that the sample size recommended by an error may need."""
AUTO_LEAST_BYTES, AUTO_MOST_BYTES, AUTO_MOST_BYTES_BASE = 10_000_000, 200_000_000, 50_000_000
"""More text than this hardly changes a vocabulary, and takes minutes per hundred megabytes; per ten with
`base_tokenizer` where words are not separated by spaces."""
SENTENCE_BYTES = 4192
"""Longest training sentence: SentencePiece's default `max_sentence_length`, over which it drops a sentence."""
PASSAGE_BYTES = 16 * 1024
HELD_OUT_SHARE, HELD_OUT_BYTES = 0.01, 1_000_000
"""Share and most bytes of the text of each source that are held out."""
HELD_OUT_MIN_BYTES, OFFERED_BYTES = 20_000, 300_000
"""Less held-out text says nothing about a tokenizer: it goes back to the training, and the source is measured on this
much text that was offered to the training, which the report says."""

RESERVED = re.compile("[\u2585\0]+")
"""Characters that SentencePiece's trainer cannot take: its mark for unknown characters, for which it drops whole
sentences, and NUL, which ends its strings."""
_SENTENCE_END = re.compile(r"[。．！？｡…।۔]+[」』）】”’]*|(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")


@dataclass
class SampleReport:
    """Counts of the text offered, chosen and used; bytes are UTF-8 bytes without line ends."""

    documents: int = 0
    bytes_offered: int = 0
    bytes_chosen: int = 0
    bytes_used: int = 0
    sentences: int = 0
    dropped_bytes: dict[str, int] = field(default_factory=dict)
    bad_lines: dict[str, int] = field(default_factory=dict)
    space_marks: int = 0
    """Documents with U+2581, which SentencePiece decodes to a space."""

    def use_text(self) -> str:
        """Return the amount of text used, with reasons for the rest, for display."""
        share = self.bytes_used / max(self.bytes_chosen, 1)
        text = f"{bytes_text(self.bytes_used)} ({share:.3%} of the sample), {plural(self.sentences, 'sentence')}"
        losses = [f"{plural(count, 'byte')} dropped: {reason}" for reason, count in self.dropped_bytes.items()]
        losses += [f"{plural(count, 'line')} skipped: {reason}" for reason, count in self.bad_lines.items()]
        losses += [f"{self.space_marks:,} documents hold U+2581, which decodes to a space"] if self.space_marks else []
        return "; ".join([text, *losses])


@dataclass(frozen=True)
class SourceTexts:
    """Texts of one source to measure tokenizers with; `held_out` ones are not trained on."""

    texts: list[str]
    held_out: bool


class Reservoir:
    """The passages with the smallest keys that fit a budget, and `least` of them even beyond it.

    With random keys they are the beginning of a shuffled list, in one pass and without its memory.
    """

    def __init__(self, budget: int, least: int = 0) -> None:
        self.budget, self.least, self.bytes, self._threshold = budget, least, 0, 1.0
        self._heap: list[tuple[float, int, bytes]] = []

    def offer(self, key: float, order: int, passage: bytes) -> list[tuple[int, bytes]]:
        """Add a passage; return those that no longer fit, which may be that passage itself."""
        if key >= self._threshold:
            return [(order, passage)]
        heapq.heappush(self._heap, (-key, order, passage))
        self.bytes += len(passage)
        out = []
        while self.bytes > self.budget and len(self._heap) > self.least:
            worst, out_order, out_passage = heapq.heappop(self._heap)
            self._threshold = -worst
            self.bytes -= len(out_passage)
            out.append((out_order, out_passage))
        return out

    def drain(self) -> list[tuple[int, bytes]]:
        """Remove and return all passages, in the order of the corpus."""
        passages = sorted((order, passage) for _, order, passage in self._heap)
        self._heap = []
        return passages


@dataclass(frozen=True)
class SampleBudget:
    """Most bytes of the sample, most memory that its training takes, and the memory that is free."""

    sample_bytes: int
    peak_bytes: int
    available_bytes: int


def plan(config: TokenizerConfig, files: Sequence[InputFile]) -> SampleBudget:
    """Resolve `sample_bytes: auto`, and bound the memory.

    Raises:
        UserError: the machine may lack the memory; names the largest sample that fits.
    """
    available, kind, fixed = available_memory(), str(config.model_type), PROCESS_BYTES
    if config.base_tokenizer:
        kind, fixed = "extend" if config.extend else "base", BASE_TOKENIZER_BYTES
    elif config.pre_segment != "none":
        kind += " of morphemes"

    def largest(share: float) -> int:
        return max(0, int(share * available) - fixed) // PEAK_BYTES[kind]

    most = AUTO_MOST_BYTES_BASE if config.base_tokenizer else AUTO_MOST_BYTES
    auto_bytes = max(AUTO_LEAST_BYTES, min(most, largest(AUTO_SHARE)))
    sample_bytes = auto_bytes if config.sample_bytes == "auto" else config.sample_bytes
    peak_bytes = fixed + PEAK_BYTES[kind] * min(sample_bytes, total_plain_bytes(files, config.text_field))
    if peak_bytes > available:
        rule = f"may need {bytes_text(peak_bytes)} of memory, and {bytes_text(available)} are free"
        remedy = f"set {largest(SAFE_SHARE)} or less" if largest(SAFE_SHARE) else "free some memory"
        remedy += ", or auto" if largest(AUTO_SHARE) >= AUTO_LEAST_BYTES else ""
        raise UserError(config.fault("sample_bytes", rule, remedy))
    return SampleBudget(sample_bytes, peak_bytes, available)


def draw(
    config: TokenizerConfig, files: Sequence[InputFile], sentences: Path, sample_bytes: int
) -> tuple[list[SourceTexts], SampleReport]:
    """Draw the sample and write its sentences; return the texts of each source, and the report.

    Raises:
        UserError: no document, or a larger share of bad ones than `max_bad_fraction`.
    """
    num_sources = max(file.source for file in files) + 1
    report, training = SampleReport(), Reservoir(sample_bytes)
    held_out = [Reservoir(min(HELD_OUT_BYTES, sample_bytes // 10)) for _ in range(num_sources)]
    offered = [Reservoir(OFFERED_BYTES) for _ in range(num_sources)]
    keys, order = random.Random(config.seed), 0
    for source, text in _documents(config, files, report):
        for passage in passages_of(text):
            order += 1
            held_key, key, content = keys.random(), keys.random(), passage.encode()
            report.bytes_offered += _text_bytes(content)
            if held_key < HELD_OUT_SHARE:
                for back in held_out[source].offer(held_key / HELD_OUT_SHARE, order, content):
                    training.offer(key, *back)
            else:
                training.offer(key, order, content)
            offered[source].offer(key, order, content)
    sources = []
    for reservoir, fallback in zip(held_out, offered, strict=True):
        enough, passages = reservoir.bytes >= HELD_OUT_MIN_BYTES, reservoir.drain()
        measured = passages if enough else fallback.drain()
        sources.append(SourceTexts([passage.decode() for _, passage in measured], enough))
        for back in [] if enough else passages:
            training.offer(keys.random(), *back)
    chosen = training.drain()[::-1]
    with open(sentences, "wb") as file:
        while chosen:  # from the end of the reversed list, so that each is freed as soon as it is written
            _, content = chosen.pop()
            report.bytes_chosen += _text_bytes(content)
            if config.base_tokenizer:  # it knows line ends as pieces, and no reserved characters
                report.sentences += 1
                report.bytes_used += _text_bytes(content)
                file.write(content + b"\n")
                continue
            text = content.decode()
            if reserved := "".join(RESERVED.findall(text)):
                reason = "character reserved by SentencePiece (U+2585, NUL)"
                report.dropped_bytes[reason] = report.dropped_bytes.get(reason, 0) + len(reserved.encode())
            for sentence in sentences_of(text):
                report.sentences += 1
                report.bytes_used += file.write(f"{sentence}\n".encode()) - 1
    return sources, report


def _documents(config: TokenizerConfig, files: Sequence[InputFile], report: SampleReport) -> Iterator[tuple[int, str]]:
    """Yield source and text of each document; count them and the bad lines, and check their share at the end."""
    tally, listed = ReadTally(), list[str]()
    bad, lost, damages = defaultdict[InputFile, Counter[str]](Counter), Counter[InputFile](), dict[InputFile, str]()
    for item in read_files(files, "reading the corpus", config.text_field, config.txt_document):
        if isinstance(item, Document):
            report.documents += 1
            report.space_marks += SPACE_MARK in item.text and not config.base_tokenizer
            yield item.file.source, item.text
        else:
            bad[item.file][item.reason.value] += item.documents
            lost[item.file] += item.lost_bytes
            damages[item.file] = damages.get(item.file) or item.damage
            if item.reason not in HARMLESS and len(listed) < 3:
                listed.append(f"{item.file.name} byte {item.offset}: {item.reason}")
    for file in files:
        tally.add(file, bad[file].total(), bad[file], lost[file], damages.get(file, ""))
    tally.documents_in += report.documents
    report.bad_lines = dict(tally.skipped.most_common())
    refuse(faults_of(config, "input", tally, f"the first: {'; '.join(listed)}"))


def passages_of(text: str) -> Iterator[str]:
    """Split a document at line ends into parts of at most `PASSAGE_BYTES`; longer lines are split like sentences."""
    if len(text) * 4 <= PASSAGE_BYTES or len(text.encode()) <= PASSAGE_BYTES:
        yield text
        return
    parts = (part for line in text.split("\n") for part in split_line(line, PASSAGE_BYTES))
    for group in gathered(parts, lambda part: len(part.encode()) + 1, PASSAGE_BYTES):
        yield "\n".join(group)


def split_line(line: str, limit: int = SENTENCE_BYTES) -> list[str]:
    """Split a line into parts of at most `limit` bytes that join to the line again.

    Splits are after the last sentence end that fits, else before a space, else anywhere between characters.
    """
    content = line.encode()
    parts, start = [], 0
    while len(content) - start > limit:
        end = start + limit
        while content[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        window = content[start:end].decode()
        ends = (max((match.end() for match in each.finditer(window)), default=0) for each in (_SENTENCE_END, _SPACE))
        parts.append(window[: next(filter(None, ends), len(window))])
        start += len(parts[-1].encode())
    return [*parts, content[start:].decode()] if parts else [line]


def sentences_of(text: str) -> Iterator[str]:
    """Yield the training sentences of a text: its lines, split where too long or at reserved characters."""
    for line in text.split("\n"):
        for part in filter(None, RESERVED.split(line)):
            yield from split_line(part)


def _text_bytes(passage: bytes) -> int:
    return len(passage) - passage.count(b"\n")
