import pytest

from zerokara.model import parallel


@pytest.fixture(autouse=True, scope="session")
def _parallel_groups() -> None:
    """The groups that every model is built in: those of a single process."""
    parallel.start_alone()
