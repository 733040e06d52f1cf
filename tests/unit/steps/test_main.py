"""`zerokara`, the command that setup.sh makes: a step by its name, or the version."""

from __future__ import annotations

import pytest

import zerokara
from zerokara.steps import __main__ as command


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"zerokara {zerokara.__version__}"),
        ([], 0, "train_tokenizer, upload"),
        (["nothing"], 2, "usage: zerokara STEP"),
    ],
)
def test_a_step_or_the_version(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["zerokara", *arguments])
    monkeypatch.setattr(command, "stop_at_once", lambda: None)
    assert command.main() == code and said in capsys.readouterr().out
