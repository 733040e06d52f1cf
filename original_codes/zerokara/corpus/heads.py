"""A look at the first lines of the corpus files, so that a wrong `text_field` or format is told within seconds.

One bad line is the business of the quarantine; here only a file none of whose first lines is a document counts.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import orjson

from zerokara.corpus.gzipped import GzipReader
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import MAX_LINE_BYTES, BadLine, ByteRange, Reason, TxtDocument, read
from zerokara.errors import Fault, UserError

HEAD_LINES = 50
MAX_FILES = 200
"""Files looked at, spread evenly over the corpus: some ten milliseconds on a local disk, seconds on a slow one."""
LINES_TO_JUDGE_ONE_FILE = 10
"""A shorter file is judged only together with the others of its source: its few lines may be bad by chance."""
_HEAD_BYTES = 1024 * 1024


def check_heads(files: Sequence[InputFile], text_field: str, txt_document: TxtDocument, where: str) -> None:
    """Look at the first lines of up to `MAX_FILES` files; `where` names the place of the setting for error messages.

    Raises:
        UserError: none of the first lines of a file, or of a whole source, is a document; names the fields found.
    """
    step = max(1, len(files) // MAX_FILES)
    faults: list[Fault] = []
    for source in sorted({file.source for file in files}):
        looked_at = [file for file in files if file.source == source and file.bytes][::step]
        bad_heads = [(file, bad) for file in looked_at if (bad := _bad_head(file, text_field, txt_document))]
        if len(bad_heads) < len(looked_at):
            bad_heads = [(file, bad) for file, bad in bad_heads if len(bad) >= LINES_TO_JUDGE_ONE_FILE]
        faults.extend(_fault(file, bad, text_field, where) for file, bad in bad_heads[:10])
    if faults:
        raise UserError(faults)


def _bad_head(file: InputFile, text_field: str, txt_document: TxtDocument) -> list[BadLine]:
    """The bad lines of a file's head when there is no document among them, else nothing."""
    if file.kind == "txt" and txt_document == "file" and file.bytes > MAX_LINE_BYTES:
        return [BadLine(file, 1, 0, Reason.TOO_LONG, "")]
    items = list(islice(read(ByteRange(file), text_field, "line"), HEAD_LINES))
    bad = [item for item in items if isinstance(item, BadLine)]
    return [item for item in bad if item.reason is not Reason.EMPTY_LINE] if len(bad) == len(items) else []


def _fault(file: InputFile, bad: list[BadLine], text_field: str, where: str) -> Fault:
    reason = Counter(item.reason for item in bad).most_common(1)[0][0]
    first = next(item for item in bad if item.reason is reason)
    place = f"{file.path}:{first.line}"
    if reason is Reason.MISSING_FIELD:
        others = f", nor have the next {len(bad) - 1} lines" if bad[1:] else ""
        rule, fields = f"has no field {text_field!r}{others}", ", ".join(_fields(file))
        remedy = f"the fields there are: {fields}; set text_field ({where}) to the one that holds the text"
        return Fault(where=place, rule=rule, remedy=remedy)
    if reason is Reason.WRONG_TYPE:
        return Fault(where=place, rule=f"field {text_field!r} does not hold text", remedy=f"set text_field ({where})")
    if reason is Reason.TOO_LONG and file.kind == "txt":
        rule = f"is one document of {file.bytes:,} bytes; at most {MAX_LINE_BYTES:,} are read as one"
        return Fault(where=str(file.path), rule=rule, remedy="set txt_document: line, so that each line is a document")
    rule = f"none of the first {len(bad)} lines is a document: {reason.value} ({first.excerpt[:60]!r})"
    return Fault(where=place, rule=rule, remedy=_remedy(file, reason))


def _remedy(file: InputFile, reason: Reason) -> str:
    head = _head(file)
    if head.startswith(b"\x1f\x8b"):
        return "the file is gzipped; let its name end in .gz"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16; write it anew as UTF-8, e.g. with: iconv -f UTF-16 -t UTF-8"
    if reason in (Reason.INVALID_UTF8, Reason.TRUNCATED_LINE) and file.kind == "txt":
        return "text must be UTF-8; write it anew, e.g. with: iconv -f SHIFT_JIS -t UTF-8"
    if file.kind == "jsonl" and head.lstrip().startswith(b"["):
        return 'the file is one JSON array; write one object a line, e.g. with: jq -c ".[]"'
    if file.kind == "jsonl":
        return 'a JSON file must have one object a line, as {"text": "..."}; name plain text .txt'
    return ""


def _fields(file: InputFile) -> list[str]:
    fields: Counter[str] = Counter()
    for line in _head(file).split(b"\n")[:HEAD_LINES]:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            fields.update(value.keys())
    return [name for name, _ in fields.most_common(20)]


def _head(file: InputFile) -> bytes:
    """The first megabyte."""
    with open(file.path, "rb") as raw:
        if not file.gzipped:
            return raw.read(_HEAD_BYTES)
        return io.BufferedReader(GzipReader(raw)).read(_HEAD_BYTES)
