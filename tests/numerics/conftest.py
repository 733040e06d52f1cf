import pytest
from tiny import python_path, span_data, tiny_data, train_runs

from zerokara.training.compute import optimizers

__all__ = ["python_path", "span_data", "tiny_data", "train_runs"]


@pytest.fixture
def deepspeeds_stage_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 as several processes have it, who cannot do without DeepSpeed."""
    of = optimizers.by_whole_tensors
    monkeypatch.setattr(optimizers, "by_whole_tensors", lambda config, data_parallel_size: of(config, 2))
