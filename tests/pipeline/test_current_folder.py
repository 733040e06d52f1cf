"""What lies in the current folder, or beside the scripts, never passes for a package of the same name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from corpus_files import write_texts
from programs import launch

NAMES = (
    *("orjson", "yaml", "torch", "numpy", "pydantic", "sentencepiece", "psutil", "tqdm", "deepspeed", "zerokara"),
    *("json", "logging", "pathlib", "socket", "subprocess"),  # of Python itself
)
HOSTILE = (
    "import os\nwith open(os.environ['MARKER'], 'a') as file:\n    file.write(__name__ + ' ')\nraise ImportError\n"
)
SCRIPTS = (
    *("1_train_sentencepiece_tokenizer.py", "2_tokenize.sh", "3_train_node1.sh", "4_convert_to_HF.sh"),
    *("plan.py", "5_generate.py", "6_upload.py", "8_evaluate.py", "count_tokens.py"),
)


@pytest.fixture
def folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, as the working directory, with files that would do harm if Python took them for packages."""
    for name in (*SCRIPTS, "5_play_with_model.ipynb", "convert_config.yaml"):
        shutil.copy(root / name, tmp_path)
    for name in ("original_codes", ".venv"):
        (tmp_path / name).symlink_to(root / name)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(HOSTILE, encoding="utf-8")
    (tmp_path / "ruamel").mkdir()
    (tmp_path / "ruamel" / "__init__.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, *arguments: str) -> str:
    start = [sys.executable] if script.endswith(".py") else ["bash"]
    done = subprocess.run([*start, script, *arguments], capture_output=True, text=True, check=False)
    assert not Path("marker").exists(), Path("marker").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_takes_packages_for_packages(folder: Path, script: str) -> None:
    assert "usage: " in run(script, "--help")


@pytest.mark.slow
def test_the_processes_of_steps_1_and_2_do_too(folder: Path) -> None:
    random = Random(5)
    words = "a line of words that tell about the sea and the wind 海 と 風".split()  # noqa: SIM905
    write_texts(folder / "corpus.jsonl", [" ".join(random.choices(words, k=40)) for _ in range(200)])
    first = {"input": "corpus.jsonl", "output_dir": "made", "vocab_size": 320, "num_threads": 2}
    second = {"input_jsonl": "corpus.jsonl", "input_tokenizer_file": "made/tokenizer.model", "output_prefix": "out"}
    for name, settings in (("first", first), ("second", second | {"num_workers": 2})):
        (folder / f"{name}.yaml").write_text("".join(f"{key}: {settings[key]}\n" for key in settings), "utf-8")
    assert "trained" in run(SCRIPTS[0], "--config", "first.yaml")
    assert "200 documents in" in run(SCRIPTS[1], "--config", "second.yaml")


PROBE = """
def main(arguments):
    import os, numpy, orjson
    open('seen' + os.environ['RANK'], 'w').close()
    return 0
if __name__ == "__main__":
    main([])
"""


def test_the_training_processes_do_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = folder / "elsewhere" / "probe.py"
    probe.parent.mkdir()
    probe.write_text(PROBE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(probe.parent))
    monkeypatch.syspath_prepend(str(probe.parent))
    assert launch("probe", [], 2) == 0
    assert Path("seen0").exists() and Path("seen1").exists() and not Path("marker").exists()


def test_a_notebook_does_too(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((folder / "5_play_with_model.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    # Jupyter has loaded these by then, before it puts the notebook's folder first.
    program = f"import sys\nsys.path.remove('')\nimport json, pathlib\nsys.path.insert(0, '')\n{first}"
    monkeypatch.setenv("PYTHONPATH", str(root / "original_codes"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "There is no model in" in done.stderr
    assert not Path("marker").exists()
