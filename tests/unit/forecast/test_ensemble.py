"""How many models fit into the hours beside each other's student."""

from pathlib import Path

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast.ensemble import MOST, folder_of, num_teachers_that_fit, relative_time, write


@pytest.mark.parametrize(
    ("hours", "number"), [(2.3, 0), (2.5, 1), (3.7, 1), (3.9, 2), (5.1, 2), (5.3, 3), (1000.0, MOST)]
)
def test_as_many_as_there_is_time_for(hours: float, number: int) -> None:
    assert num_teachers_that_fit(hours, hours_of_one=1.0) == number
    assert num_teachers_that_fit(10 * hours, hours_of_one=10.0) == number


def test_a_student_reads_with_its_teachers() -> None:
    assert relative_time(3) == pytest.approx(3 + 1 + 1.2)


def test_teachers_in_the_file_do_not_teach_the_teachers(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_text(f"teachers: [elsewhere]\noutput_model_dir: {tmp_path / 'run'}\n")
    write(path, [], 1, lambda *_: [])
    one, student = (load(PretrainConfig, each) for each in sorted((tmp_path / "run_learns_from_1").glob("*.yaml")))
    assert one.teachers == () and student.teachers == (f"{one.output_model_dir}_hf",)


def test_each_model_has_a_seed_of_its_own(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_text(f"output_model_dir: {tmp_path / 'run'}\n")
    write(path, [], 3, lambda *_: [])
    assert len({load(PretrainConfig, each).seed for each in (tmp_path / "run_learns_from_3").glob("*.yaml")}) == 4


def test_the_files_lie_beside_the_run_folder_however_it_is_written(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_text(f"output_model_dir: {tmp_path / 'run'}/\n")
    assert folder_of(load(PretrainConfig, path), 2) == tmp_path / "run_learns_from_2"
