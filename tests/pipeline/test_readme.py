"""The README and the documents hold: their commands and options, settings, examples, files and tables of numbers."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import warm

from zerokara.config.finetune_config import DataFormat
from zerokara.config.loading import FILES, load
from zerokara.config.model import SIZES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.model.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "original_codes" / "zerokara"
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/[a-z]*.md"))]
}
FOR_ENGINEERS = {"architecture.md", "decisions.md", "recipe.md", "rounding.md", "scale.md", "tokenizers.md"}
"""Pages that name functions and variables of the code, which look like settings."""
READY_SETS = {
    path.name.removesuffix("_convert_config.yaml") for path in ROOT.glob("model_configs/*_convert_config.yaml")
}
RUNNERS = ("bash", "python", "-m", "sbatch")


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a page; `bash` are commands of ours, `sh` those of other programs."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Lines of the shell blocks, and commands quoted in the text and the tables."""
    typed: list[str] = []
    for text in PAGES.values():
        lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
        typed += [line.split("  #")[0].strip() for line in lines]
        typed += re.findall(r"`((?:\./|bash |python (?:-m )?)[\w/]+\.[^`]+)`", text)
    return sorted({command for command in typed if command})


@cache
def help_of(script: str) -> str:
    start = [warm.python()] if script.endswith(".py") else ["bash"]
    if script.startswith("benchmarks."):
        start = [sys.executable, "-m"]
    given = {**os.environ, "PYTHONSAFEPATH": ""}  # modules of benchmarks/ are found in the current folder
    done = subprocess.run([*start, script, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_command_exists_and_knows_its_options(warm_python: None) -> None:
    found = commands()
    assert len(found) > 30
    for command in found:
        words = [word for word in command.split() if word not in RUNNERS]
        script = words[0].removeprefix("./")
        assert script.startswith("benchmarks.") or (ROOT / script).is_file(), command
        assert command.split()[0] in RUNNERS or (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"
        if script in ("setup.sh", "run_tests.sh", "tests/clients/run.sh"):  # they hand their arguments on
            continue
        for option in (word for word in words[1:] if word.startswith("--")):
            assert re.search(rf"{option}\b", help_of(script)), f"{script} knows no {option}"
        for name in (word for word in words[1:] if script == "run_all.sh" and not word.startswith("--")):
            assert (ROOT / f"{name}_config.yaml").is_file(), command


def test_every_example_of_settings_loads(tmp_path: Path) -> None:
    """A block of settings says of which file it is in its first line: ``# config.yaml``."""
    shown = set()
    for name, example in ((name, block) for name, text in PAGES.items() for block in blocks(text, "yaml")):
        parts = re.split(r"^# (\S+\.yaml)$", example, flags=re.MULTILINE)[1:]
        assert parts, name
        for file, text in zip(parts[::2], parts[1::2], strict=True):
            if file in FILES:  # and not one of another program
                (tmp_path / file).write_text(text, encoding="utf-8")
                assert load(FILES[file], tmp_path / file)
                shown.add(file)
    assert shown == set(FILES)


def test_settings_named_in_the_pages_exist() -> None:
    known = {key for config_class in FILES.values() for key in config_class.model_fields} | READY_SETS
    metrics = set(re.findall(r"`(\w+)`", PAGES["metrics.md"]))
    known |= set(get_args(DataFormat)) | metrics
    known |= {"inverse_sqrt", "left_out"}  # a value; a field of a manifest
    # Settings, fields and folders of other programs.
    known |= {"eos_token_id", "prefix_token_id", "max_position_embeddings", "get_vocab_base_pre"}
    known |= {"tool_calls", "kto_tag", "node_modules"}
    pages = "".join(PAGES[name] for name in PAGES.keys() - FOR_ENGINEERS)
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:: [^`]*)?`", pages))
    assert len(metrics) > 20 and len(named) > 100 and named <= known, named - known


def test_files_named_in_the_pages_exist() -> None:
    for pattern in (
        r"`([\w-]+(?:/[\w.-]+)+\.(?:py|md|sh|json|yaml|jinja))`",
        r"`((?:original_codes|tests|model_configs|benchmarks)/[\w./]*)`",
        r"`([\w-]+\.(?:sh|sbatch|ipynb|lock))`",
    ):
        named = {path for text in PAGES.values() for path in re.findall(pattern, text)}
        assert len(named) > 3, pattern
        assert not {path for path in named if not any((top / path).exists() for top in (ROOT, PACKAGE))}


def test_the_readme_is_a_page_and_its_translations_show_the_same() -> None:
    """Code and links are the same to the byte, but for the link at the top from each language to the others."""
    assert len((ROOT / "README.md").read_bytes()) < 10_000

    def shown(text: str) -> list[str]:
        return re.findall(r"```.*?```|`[^`\n]+`|\]\([^)]+\)", text.split("\n## ", 1)[1], re.DOTALL)

    wanted = sorted(shown(PAGES["README.md"].replace("](docs/", "](")))
    translations = [*ROOT.glob("docs/README.*.md")]
    assert len(translations) == 4
    for path in translations:
        assert sorted(shown(path.read_text(encoding="utf-8"))) == wanted, path.name


def test_the_table_of_sizes_is_right() -> None:
    row = r"^\| ([\d.]+[MB])[^|]* \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d.]+) ([MB]) \|"
    rows = re.findall(row, PAGES["model-sizes.md"], re.MULTILINE)
    assert [name for name, *_ in rows] == list(SIZES)
    for name, layers, width, heads, pieces, number, unit in rows:
        autos = {"num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto"}
        settings = PretrainConfig(model_size=name, seq_len=2048, **autos)
        made = settings.resolved_sizes()
        assert [made[key] for key in autos] == [int(layers), int(width), int(heads)]
        parameters = ModelShape.from_config(settings, vocab_size=int(pieces.replace(",", ""))).num_parameters()
        assert float(number) * {"M": 1e6, "B": 1e9}[unit] == pytest.approx(parameters, rel=0.04)


def test_the_ready_sets_have_the_parameters_that_are_told() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) M \| (?:(\d+) M )?\|$", PAGES["model-kinds.md"], re.MULTILINE)
    assert len(rows) == len(READY_SETS) and {name for name, *_ in rows} == READY_SETS
    for name, total, active in rows:
        settings = load(PretrainConfig, ROOT / "model_configs" / f"{name}_config.yaml")
        tokenizer = load(TokenizerConfig, ROOT / "model_configs" / f"{name}_sentence_piece_config.yaml")
        shape = ModelShape.from_config(settings, tokenizer.vocab_size)
        assert round(shape.num_parameters(padded=False) / 1e6) == int(total), name
        assert round(shape.num_active_parameters() / 1e6) == int(active or total), name
