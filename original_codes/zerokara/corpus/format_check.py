"""A check of the first lines of the corpus files, so that a wrong `text_field` or format is reported within seconds.

Single bad lines are left to the quarantine. A fault is a file without a document among its first lines, or with content
of another format than its name says. Empty lines and texts prove nothing and are skipped.
"""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from zerokara.base.errors import Fault, RunError, refuse, shown
from zerokara.base.progress import plural
from zerokara.corpus import documents
from zerokara.corpus.compressed import CompressedReader
from zerokara.corpus.documents import BadLine, Document, Reason, TxtDocument, object_of_line
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import BUFFER_BYTES, Range, is_one_document, read

HEAD_LINES = 50
"""Bad lines that show a wrong format."""
MAX_LINES, MAX_BYTES = 5000, 4 * 1024 * 1024
"""Maximum number of lines, including empty ones, and unpacked bytes that are read."""
MAX_FILES, MAX_REMOTE_FILES = 200, 10
"""Maximum number of files checked, evenly spaced: each takes some ten milliseconds, a remote one tenths of a second."""
LINES_TO_JUDGE_ONE_FILE = 10
"""A shorter file is judged only together with the others of its source: its few lines may be bad by chance."""
_PROVES_NOTHING = frozenset({Reason.EMPTY_LINE, Reason.EMPTY_TEXT, Reason.NULL})
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_TEXT = re.compile("[^\0-\x08\x0b\x0e-\x1f\ufffd]+\ufffd?")
"""What UTF-8 text decodes to; its last character may be cut off."""
_ENDINGS = {"none": ".jsonl or .txt", "gzip": ".jsonl.gz or .txt.gz", "zstd": ".jsonl.zst or .txt.zst"}


def check_formats(files: Sequence[InputFile], text_field: str, txt_document: TxtDocument, where: str) -> None:
    """Check the first lines of up to `MAX_FILES` files; `where` is the place of `text_field` in the configuration.

    Raises UserError, with the fields found, if none of the first lines of a file, or of a source, is a document.
    """
    faults: list[Fault] = []
    try:
        for source in sorted({file.source for file in files}):
            filled = [file for file in files if file.source == source and file.bytes]
            too_long = [
                file for file in filled if is_one_document(file, txt_document) and file.bytes > documents.MAX_LINE_BYTES
            ]
            faults += map(_too_long, too_long[:10])
            filled = [file for file in filled if file not in too_long]
            most = MAX_REMOTE_FILES if any(file.remote for file in filled) else MAX_FILES
            checked = filled[:: -(-len(filled) // most) or 1]
            misnamed = {file: fault for file in checked if (fault := _misnamed(file))}
            checked = [file for file in checked if file not in misnamed]
            bad = [(file, lines) for file in checked if (lines := _bad_head(file, text_field, txt_document))]
            if len(bad) < len(checked):
                bad = [one for one in bad if len(one[1]) >= LINES_TO_JUDGE_ONE_FILE or _other_format(*one)]
            faults += list(misnamed.values())[:10]
            faults += [_fault(file, lines, text_field, txt_document, where) for file, lines in bad[:10]]
    except OSError as error:
        raise RunError(f"cannot read {shown(str(error.filename))}: {error.strerror}") from error
    refuse(faults)


def _misnamed(file: InputFile) -> Fault | None:
    """Fault of a file whose first bytes are of another format than its name says."""
    with file.open(0) as raw:
        head = raw.read(1024)
    by_name = "parquet" if file.format == "parquet" else file.compression
    if b"~{" in head and _encoding(head) == "HZ":  # Chinese in ASCII, which would pass for text
        return Fault(file.name, "the file is HZ text, not UTF-8", remedy="convert it: Python's codec hz reads it")
    found = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "none")
    if found == by_name or (found == "none" and not _TEXT.fullmatch(head.decode("utf-8", "replace"))):
        return None
    rule = f"the file is {'plain text' if found == 'none' else found}, not what its name says"
    return Fault(where=file.name, rule=rule, remedy=f"rename it to end in {_ENDINGS.get(found, '.parquet')}")


def _too_long(file: InputFile) -> Fault:
    rule = f"is one document of {file.bytes:,} bytes; at most {documents.MAX_LINE_BYTES:,} are read as one"
    return Fault(file.name, rule, remedy="split it, or set txt_document: line, so that each line is a document")


def _bad_head(file: InputFile, text_field: str, txt_document: TxtDocument) -> list[BadLine]:
    """Bad lines at the start of a file, if there is no document among them, or each spoils the one document that the
    file is; else nothing."""
    bad, size, has_text = list[BadLine](), 0, False
    for item in islice(read(Range(file), text_field, "line"), MAX_LINES):
        if isinstance(item, BadLine):
            bad += [item] if item.reason not in _PROVES_NOTHING else []
        elif not is_one_document(file, txt_document):
            return []
        else:
            has_text = True
        size += item.bytes
        if len(bad) == HEAD_LINES or size > MAX_BYTES:
            break
    return [item for item in bad if not has_text or item.reason is not Reason.CR_ENDS]  # beside other line ends


def _fault(file: InputFile, bad: list[BadLine], text_field: str, txt_document: TxtDocument, where: str) -> Fault:
    reason = Counter(item.reason for item in bad).most_common(1)[0][0]
    first = next(item for item in bad if item.reason is reason)
    place, lines = f"{file.name}:{first.line}", "rows" if file.format == "parquet" else "lines"
    rule, remedy = f"none of the first {len(bad)} {lines} is a document: {reason.value} ({first.excerpt!r})", ""
    if is_one_document(file, txt_document):
        unreadable = f"{plural(len(bad), 'line')} cannot be read: {reason.value} ({first.excerpt!r})"
        rule = f"is one document, of which {unreadable}"
    if reason in (Reason.MISSING_FIELD, Reason.WRONG_TYPE):
        others = f", nor have the next {len(bad) - 1} {lines}" if bad[1:] else ""
        found = f" but {first.excerpt}" if file.format == "parquet" else ""
        not_text = f"field {text_field!r} does not hold text{found}"
        rule = not_text if reason is Reason.WRONG_TYPE else f"has no field {text_field!r}{others}"
        fields = _fields(file, first)
        remedy = f"its fields are: {', '.join(fields)}; set text_field ({where}) to the one of the text"
        if fields == [text_field]:
            remedy = "it is the only field: convert it to strings"
    elif reason is Reason.DAMAGED:
        remedy = "download or create the file again, or leave it out of the input"
    elif other := _other_format(file, bad):
        remedy = other
    elif reason is Reason.INVALID_UTF8 or (reason is Reason.TRUNCATED_LINE and file.format == "txt"):
        names = (
            "CP1252 in Western, CP1250 in Central Europe, CP1251 Cyrillic, CP1256 Arabic, CP1258 Vietnamese, CP874 Thai"
        )
        remedy = f"text must be UTF-8; convert it from its encoding ({names}): iconv -f CP… -t UTF-8"
    elif file.format == "jsonl":
        remedy = 'a JSON file must have one object a line, as {"text": "..."}; name plain text .txt'
    return Fault(place, rule, remedy=remedy)


def _encoding(head: bytes) -> str:
    """Encoding of text that is not UTF-8, as iconv spells it; empty where none is sure, as of one byte a letter."""
    from charset_normalizer import from_bytes  # only where text is not what it should be

    head = head[: len(head) & ~3 if b"\0" in head else head.rfind(b"\n") + 1 or None]  # no half of a character
    best = from_bytes(head, cp_exclusion=["shift_jis_2004", "shift_jisx0213", "euc_jis_2004", "euc_jisx0213"]).best()
    name = best.encoding if best is not None and best.multi_byte_usage and best.encoding != "utf_8" else ""
    return name.upper().replace("_", "").replace("UTF", "UTF-")


def _other_format(file: InputFile, bad: list[BadLine]) -> str:
    """Format of a file without documents by its first bytes, and the remedy; empty if unclear."""
    if file.format == "parquet":
        return ""
    with file.open(BUFFER_BYTES) as raw:
        packed = CompressedReader(raw, file.compression, file.name) if file.is_compressed else None
        head = (io.BufferedReader(packed) if packed else raw).read(MAX_BYTES)
    if encoding := _encoding(head[:BUFFER_BYTES]):
        return f"the file seems to be {encoding}; convert it to UTF-8, e.g. with: iconv -f {encoding} -t UTF-8"
    if b"\n" not in head.rstrip() and b"\r" in head.rstrip():
        return "its lines end in CR alone; convert it, e.g. with: tr '\\r' '\\n'"
    if any(item.reason is Reason.SEVERAL_OBJECTS for item in bad):
        return "write one object a line, e.g. with: jq -c ."
    text = head.removeprefix(documents.BOM).lstrip()
    if file.format == "jsonl" and re.match(rb"\[\s*\{", text):
        return 'the file is one JSON array; write one object a line, e.g. with: jq -c ".[]"'
    return ""


def _fields(file: InputFile, first: BadLine) -> list[str]:
    """Fields of the first bad line and of those after it."""
    if file.format == "parquet":
        from zerokara.corpus import tables  # pyarrow: only where there is such a file

        with tables.opened(file) as table:
            return list(table.schema_arrow.names[:20])
    fields: Counter[str] = Counter()
    lines = read(Range(replace(file, format="txt")), txt_document="line")
    for item in islice(lines, first.line - 1, first.line - 1 + HEAD_LINES):
        value = object_of_line(item.text) if isinstance(item, Document) else Reason.BROKEN_JSON
        fields.update([*value] if isinstance(value, dict) else [])
    return [name for name, _ in fields.most_common(20)]
