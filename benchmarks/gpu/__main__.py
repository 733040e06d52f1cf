"""Command line of the measurements on a GPU: ``python -m benchmarks.gpu PART``; `benchmarks/gpu.sh` lists the parts."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import first
from benchmarks.gpu.jobs import PARTS
from benchmarks.gpu.measure import read_lines, run_part
from benchmarks.gpu.table import lines_of


def main() -> None:
    """Do the parts that are wanted; then print the table of all that was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["first", "tests", *PARTS, "all", "table"])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="for the table: further results")
    parser.add_argument("--results", type=Path, help="folder for everything; `first` prints all, and needs none")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of the part, this measurement")
    given = parser.parse_args()
    failed: list[str] = []
    if given.part == "first":
        with tempfile.TemporaryDirectory() as folder:
            given.results = given.results or Path(folder) / "results"
            given.results.mkdir(parents=True, exist_ok=True)
            failed = first.run(given, Path(folder))
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    if given.results is None:
        parser.error("--results: a folder is needed")
    if given.part != "table":
        given.results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            for part in ["tests", *PARTS] if given.part == "all" else [given.part]:
                failed += run_part(part, given, Path(folder))
    found = [line for folder in (given.results, *given.folders) for line in read_lines(folder)]
    table = "\n".join(lines_of(found) if found else ["nothing was measured"])
    print(f"\n{table}")
    if given.part != "table":
        (given.results / "table.md").write_text(table + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
