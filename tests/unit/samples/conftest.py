from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents

EOD = 2


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Token files of the documents [10 11 12 EOD], [20 21 EOD], [30 … 38 EOD]: 17 tokens."""
    documents = [[10, 11, 12, EOD], [20, 21, EOD], [*range(30, 39), EOD]]
    write_documents(tmp_path / "tokens", [np.array(ids) for ids in documents], np.dtype(np.uint16))
    return tmp_path / "tokens"
