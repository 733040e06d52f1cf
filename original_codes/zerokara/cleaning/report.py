"""What the stages found: the page that shows it (`page.html.jinja`), and the rows of the step's summary."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.cleaning.duplicates import joined, similarity
from zerokara.cleaning.plan import CLEAN, DROPPED, KEPT, RANK, UNREADABLE, Plan, records, saved, saved_facts
from zerokara.corpus.token_hashes import tokens_of
from zerokara.pages import template
from zerokara.progress import bytes_text, plural

_NUM_SHOWN, _NUM_EXAMPLES, _NUM_CHARACTERS = 12, 3, 400


class Report:
    """Counts of all tasks together, and what the page shows of the text."""

    def __init__(self, folder: Path, plan: Plan):
        self.config, self.rules, self.counts = plan.config, plan.rules, defaultdict[str, Counter[str]](Counter)
        self.examples = defaultdict[str, list[Any]](list)
        self.num_evaluation_texts, self._folder = len(plan.evaluation[0]), folder
        entries = {part.file.name: plan.config.input[part.file.source] for task in plan.tasks for part in task}
        self.sources: dict[str, dict[str, Counter[str]]] = {entry: defaultdict(Counter) for entry in plan.config.input}
        """Of each entry of the input, what stays and what each rule dropped: documents and bytes; `read` is all."""
        self.read = {entry: Counter[str]() for entry in plan.config.input}
        surveyed, written = (saved_facts(folder, name, len(plan.tasks)) for name in ("survey", "write"))
        for facts, tallies in zip(surveyed, written, strict=True):
            for name, tally in facts["tallies"].items():
                for key, number in tally.items() if name != UNREADABLE else ():
                    source, _, unit = key.partition("\t")
                    self.read[entries[source]][unit] += number
            for name, counts in facts["counts"].items():
                self.counts[name].update(counts)
            for name, examples in facts["examples"].items():
                self.examples[name] = [*self.examples[name], *examples][:_NUM_EXAMPLES]
            for name, tally in tallies.items():
                for key, number in tally.items():
                    source, _, unit = key.partition("\t")
                    self.sources[entries[source]][name][unit] += number

    def total(self, name: str, unit: str = "bytes") -> int:
        """Documents or bytes of what stays (`CLEAN`) or a rule dropped, of all entries."""
        return sum(tally[name][unit] for tally in self.sources.values())

    @property
    def dropped(self) -> list[tuple[str, int, int]]:
        """The rules that dropped something, with the numbers of documents and bytes."""
        found = ((rule, self.total(DROPPED + rule, "documents"), self.total(DROPPED + rule)) for rule in self.rules)
        return [each for each in found if each[1]]

    def pairs(self) -> Iterator[tuple[float, list[list[tuple[str, bool]]]]]:
        """Near duplicates of every similarity: both texts, where they differ, in runs; True is not in the other."""
        copies = saved(self._folder, "copies", 0)
        near = copies[:2, copies[2] == 0].T
        near = near[:: max(1, len(near) // 1000)]
        values = similarity(self._folder, *near.T)
        order = np.argsort(values, kind="stable")
        for place in order[:: max(1, len(order) // _NUM_SHOWN)][:_NUM_SHOWN].tolist():
            second, first = (self._text(document) for document in near[place].tolist())
            differing = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
            start = max(0, next(differing, 0) - _NUM_CHARACTERS // 4)
            first, second = (text[start : start + _NUM_CHARACTERS] for text in (first, second))
            codes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
            runs = [((first[a:b], kind != "equal"), (second[c:d], kind != "equal")) for kind, a, b, c, d in codes]
            yield values[place], [list(side) for side in zip(*runs, strict=True)]

    def lines(self) -> Iterator[tuple[str, int]]:
        """The lines that most documents have, and their number."""
        repeated = joined(self._folder, "repeated", 3)
        order = np.argsort(-repeated[:, 1].astype(np.int64), kind="stable")
        for key, number, document in repeated[order[:_NUM_SHOWN]].tolist():
            text = self._text(document)
            yield text.split("\n")[tokens_of([text]).line_hashes().tolist().index(key)][:_NUM_CHARACTERS], number

    def _text(self, document: int) -> str:
        rank, row = divmod(document, 1 << RANK)
        return str(next(islice(records(self._folder, KEPT, rank), row, None))["text"])

    def as_json(self) -> dict[str, Any]:
        """The counts, without any text of the corpus."""
        return {"counts": self.counts, "sources": self.sources}

    def page(self) -> str:
        """Render the report as one HTML page."""
        made = template(
            Path(__file__).with_name("page.html.jinja"),
            bytes=bytes_text,
            count="{:,}".format,
            percent=lambda share: f"{share:.2%}",
        )
        return made.render(report=self, config=self.config, plural=plural)

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the step's summary."""
        read = sum(self.read.values(), Counter[str]())
        documents, size, left = read["documents"], read["bytes"] or 1, self.total(CLEAN)
        return [
            ("read", f"{plural(documents, 'document')}, {bytes_text(size)} of text"),
            *((rule, f"{plural(n, 'document')}, {bytes_text(b)} ({b / size:.2%})") for rule, n, b in self.dropped),
            ("stays", f"{plural(self.total(CLEAN, 'documents'), 'document')}, {bytes_text(left)} ({left / size:.1%})"),
        ]
