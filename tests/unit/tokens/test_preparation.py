"""What step 2 finds out about a tokenizer before the work: that it can be exported, and what is special about it."""

from __future__ import annotations

from pathlib import Path

import foreign_models
import pytest
from foreign_models import LLAMA

from zerokara.errors import UserError
from zerokara.tokens.preparation import Preparation


def test_the_user_is_told_of_a_tokenizer_that_step_1_did_not_make(tmp_path: Path) -> None:
    path = foreign_models.train(tmp_path / "llama.model", LLAMA)
    prepared = Preparation(path, [], 0)({})
    assert (prepared.tokenizer.eos_id, prepared.choice.encoder) == (2, None)
    assert any("<0x0A>" in note for note in prepared.notes)


def test_a_tokenizer_that_no_export_could_have_is_refused_before_the_work(tmp_path: Path) -> None:
    path = foreign_models.train(tmp_path / "llama.model", {**LLAMA, "user_defined_symbols": ["<a>"]})
    with pytest.raises(UserError) as caught:
        Preparation(path, [], 0)({})
    (fault,) = caught.value.faults
    assert fault.where == str(path) and "'<a>'" in fault.rule
