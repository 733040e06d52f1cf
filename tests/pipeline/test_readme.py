"""What the README tells people to type is true: every command is there and knows its options; every setting exists."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from zerokara.config.architectures import SIZES
from zerokara.config.finetune_config import DataFormat
from zerokara.config.loading import FILES, load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.model.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "original_codes" / "zerokara"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENDING = "_convert_config.yaml"
READY_SETS = {path.name.removesuffix(ENDING) for path in ROOT.glob(f"model_configs/*{ENDING}")}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Lines of the shell blocks, and commands quoted in the text and the table."""
    typed = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    typed += re.findall(r"`((?:\./|bash |python )[^`]+)`", README)
    return sorted({command for command in typed if command})


RUNNERS = ("bash", "python", "sbatch")


@cache
def help_of(script: str) -> str:
    start = [sys.executable] if script.endswith(".py") else ["bash"]
    done = subprocess.run([*start, ROOT / script, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", commands())
def test_every_command_exists_and_knows_its_options(command: str) -> None:
    words = [word for word in command.split() if word not in RUNNERS]
    script = words[0].removeprefix("./")
    assert (ROOT / script).is_file()
    assert command.split()[0] in RUNNERS or (ROOT / script).stat().st_mode & 0o111, "is not executable"
    if script in ("setup.sh", "run_tests.sh"):  # these hand their arguments on to pip and pytest
        return
    for option in (word for word in words[1:] if word.startswith("--")):
        assert re.search(rf"{option}\b", help_of(script)), f"{script} knows no {option}"
    for name in (word for word in words[1:] if script == "run_all.sh" and not word.startswith("--")):
        assert (ROOT / f"{name}_config.yaml").is_file()


def test_every_example_of_settings_loads(tmp_path: Path) -> None:
    shown = set()
    for example in blocks("yaml"):
        parts = re.split(r"^# (\w+\.yaml)$", example, flags=re.MULTILINE)[1:]
        assert parts, "an example must say of which file it is: # config.yaml"
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert load(FILES[name], tmp_path / name)
            shown.add(name)
    assert shown == set(FILES)


def test_settings_and_files_named_in_the_text_exist() -> None:
    fields = {key for config_class in FILES.values() for key in config_class.model_fields}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:: [^`]*)?`", README))
    named -= {"expert_load", "expert_dropped", "router_entropy"}  # of metrics.jsonl
    named -= READY_SETS | set(get_args(DataFormat))
    assert named <= fields, named - fields
    for path in re.findall(r"`((?:original_codes|tests|model_configs)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path


def test_settings_named_in_the_glossary_exist() -> None:
    fields = {key for config_class in FILES.values() for key in config_class.model_fields}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")))
    assert named - fields <= {"grad_norm", "inverse_sqrt", "valid_end_nats", "valid_sentinel_nats"}, named - fields


def test_the_table_of_sizes_is_right() -> None:
    rows = re.findall(
        r"^\| ([\d.]+[MB])[^|]* \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) "
        r"\| ([\d.]+) ([MB]) \| ([\d.]+) ([MB]) \| ([\d.]+) ([MG])B \|$",
        README,
        re.MULTILINE,
    )
    units = {"M": 1e6, "B": 1e9, "G": 1e9}
    assert [row[0] for row in rows] == list(SIZES)
    for name, layers, width, heads, pieces, number, unit, tokens, tokens_unit, disk, disk_unit in rows:
        settings = PretrainConfig(
            model_size=name, num_layers="auto", hidden_size="auto", num_attn_heads="auto", seq_len=2048
        )
        made = settings.resolved_sizes()
        assert (made["num_layers"], made["hidden_size"]) == (int(layers), int(width))
        assert made["num_attn_heads"] == int(heads)
        parameters = ModelShape.from_config(settings, vocab_size=int(pieces.replace(",", ""))).num_parameters()
        assert float(number) * units[unit] == pytest.approx(parameters, rel=0.04)
        assert float(tokens) * units[tokens_unit] == pytest.approx(20 * parameters, rel=0.15)
        assert float(disk) * units[disk_unit] == pytest.approx(12 * parameters, rel=0.25 if parameters < 4e7 else 0.03)
    shipped = load(PretrainConfig, ROOT / "config.yaml")
    told = re.search(r"\| ([\d.]+M), as shipped \|.*\| 4,000 \|", README)
    made = shipped.resolved_sizes()
    assert told and SIZES[told[1]] == (made["num_layers"], made["hidden_size"], made["num_attn_heads"])


def test_the_ready_sets_have_the_parameters_that_are_told() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) M \| (?:(\d+) M )?\|$", README, re.MULTILINE)
    there = {
        path.name.removesuffix("_convert_config.yaml") for path in ROOT.glob("model_configs/*_convert_config.yaml")
    }
    assert len(rows) == len(there) and {name for name, *_ in rows} == there
    for name, total, active in rows:
        settings = load(PretrainConfig, ROOT / "model_configs" / f"{name}_config.yaml")
        tokenizer = load(TokenizerConfig, ROOT / "model_configs" / f"{name}_sentence_piece_config.yaml")
        shape = ModelShape.from_config(settings, tokenizer.vocab_size)
        assert round(shape.num_parameters(padded=False) / 1e6) == int(total), name
        assert round(shape.num_active_parameters() / 1e6) == int(active or total), name


def test_the_table_of_memory_is_right() -> None:
    """Gigabytes for 1 and 8 GPUs, from the formula that stands beside them and the parameters of the table above."""
    parameters = [0.110, 0.336, 0.729, 1.28, 2.60]
    rows = re.findall(r"^\| (\d) \|[^|]+\|([^|]+ P[^|]*)\|(.*)\|$", README, re.MULTILINE)
    assert [stage for stage, *_ in rows] == ["1", "2", "3"]
    for _, formula, cells in rows:
        shares = {n: eval(formula.replace(" P", "").replace("N", str(n))) for n in (1, 8)}
        for cell, millions in zip(cells.split("|"), parameters, strict=True):
            for n, number in zip((1, 8), re.findall(r"[\d.]+", cell), strict=True):
                assert float(number) == pytest.approx(millions * shares[n], rel=0.05, abs=0.06), (formula, cell)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_files_named_in_the_documents_exist(path: Path) -> None:
    named = re.findall(r"`([\w-]+(?:/[\w.-]+)+\.(?:py|md|sh|json|yaml))`", path.read_text(encoding="utf-8"))
    missing = {name for name in named if not any((top / name).exists() for top in (ROOT, PACKAGE))}
    assert not missing


def test_the_map_of_the_code_has_every_room_of_the_package() -> None:
    text = (ROOT / "original_codes" / "README.md").read_text(encoding="utf-8")
    rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert rooms == set(re.findall(r"[\w]+(?:/|\.py)", text.split("```")[1]))
