"""What the stages found: the page that shows it (`page.html.jinja`), and the rows of the step's summary."""

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.base.pages import template
from zerokara.base.progress import bytes_text, plural
from zerokara.cleaning.plan import CLEAN, LOST, READ, UNREADABLE, Plan, facts, joined
from zerokara.cleaning.stages import line_key, shown
from zerokara.corpus.documents import Reason
from zerokara.corpus.tally import ReadTally

_NUM_EXAMPLES, _NUM_CHARACTERS = 3, 400


class Report:
    """Counts of all tasks together, and what the page shows of the text."""

    def __init__(self, folder: Path, plan: Plan):
        self.config, self.rules, self.counts = plan.config, plan.rules, defaultdict[str, Counter[str]](Counter)
        self.examples, self.num_evaluation_files = defaultdict[str, list[Any]](list), len(plan.evaluation_files)
        entries, self.left_out = {file.name: plan.config.input[file.source] for file in plan.files}, plan.files.left_out
        self.sources: dict[str, dict[str, Counter[str]]] = {entry: defaultdict(Counter) for entry in plan.config.input}
        """Documents and bytes of each entry: what was read (`READ`), what stays (`CLEAN`), what each rule dropped."""
        (self._pairs, self._lines), self._texts = shown(folder), dict[int, str]()
        for found in facts(folder, "read", len(plan.tasks)):
            for name, counts in found["counts"].items():
                self.counts[name].update(counts)
            for name, examples in found["examples"].items():
                self.examples[name] = [*self.examples[name], *examples][:_NUM_EXAMPLES]
        cleaned = joined(folder, "cleaned")
        self.num_equal = len(cleaned) - len(np.unique(cleaned))
        """Texts that became equal to others when repeated lines were cut, after the search for copies."""
        bad, damages = defaultdict[str, Counter[str]](Counter), dict[str, str]()
        for found in facts(folder, "write", len(plan.tasks)):
            self._texts.update(found["texts"])
            damages = found["damages"] | damages
            for name, tally in found["tallies"].items():
                for key, number in tally.items():
                    source, _, unit = key.partition("\t")
                    self.sources[entries[source]][name][unit] += number
                    bad[source][unit] += number if name == UNREADABLE else 0
        self.read = ReadTally(self.total(READ, "documents"))
        for file in plan.files:
            units = bad[file.name]
            reasons = {str(reason): units[reason] for reason in Reason if units[reason]}
            self.read.add(file, 0, reasons, units[LOST], damages.get(file.name, ""))

    def total(self, name: str, unit: str = "bytes") -> int:
        """Documents or bytes of what stays (`CLEAN`) or a rule dropped, of all entries."""
        return sum(tally[name][unit] for tally in self.sources.values())

    @property
    def dropped(self) -> list[tuple[str, int, int]]:
        """The rules that dropped something, with the numbers of documents and bytes."""
        found = ((rule, self.total(rule, "documents"), self.total(rule)) for rule in self.rules)
        return [each for each in found if each[1]]

    def pairs(self) -> Iterator[tuple[float, list[list[tuple[str, bool]]]]]:
        """Near duplicates of every similarity: both texts, where they differ, in runs; True is not in the other."""
        for value, copy, original in self._pairs:
            first, second = self._texts[original], self._texts[copy]
            differing = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
            start = max(0, next(differing, 0) - _NUM_CHARACTERS // 4)
            first, second = (text[start : start + _NUM_CHARACTERS] for text in (first, second))
            codes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
            runs = [((first[a:b], kind != "equal"), (second[c:d], kind != "equal")) for kind, a, b, c, d in codes]
            yield value, [list(side) for side in zip(*runs, strict=True)]

    def lines(self) -> Iterator[tuple[str, int]]:
        """The lines that most documents have, and their number."""
        for key, number, first in self._lines:
            of_text = self._texts[first].split("\n")
            yield next((line for line in of_text if line_key(line) == key), "…")[:_NUM_CHARACTERS], number

    def as_json(self) -> dict[str, Any]:
        """The counts, without any text of the corpus."""
        return {"counts": self.counts, "sources": self.sources, "left_out": self.left_out}

    def page(self) -> str:
        path = Path(__file__).with_name("page.html.jinja")
        made = template(path, bytes=bytes_text, count="{:,}".format, percent="{:.2%}".format)
        return made.render(report=self, config=self.config, plural=plural)

    def rows(self) -> list[tuple[str, str]]:
        size, left = self.total(READ) or 1, self.total(CLEAN)
        equal = f"{plural(self.num_equal, 'text')} became equal to others without their repeated lines"
        again = f"{equal}: run step 0 again, with this clean text as its input, to drop them"
        return [
            ("read", f"{plural(self.total(READ, 'documents'), 'document')}, {bytes_text(size)} of text"),
            *((rule, f"{plural(n, 'document')}, {bytes_text(b)} ({b / size:.2%})") for rule, n, b in self.dropped),
            *([("lost", self.read.losses)] if self.read.bytes_lost else []),
            ("stays", f"{plural(self.total(CLEAN, 'documents'), 'document')}, {bytes_text(left)} ({left / size:.1%})"),
            *([("warning", again)] if self.config.exact_duplicates and self.num_equal else []),
        ]
