"""How many models fit into the hours beside each other's student."""

import pytest

from zerokara.forecast.ensemble import MOST, fitting, runs_of


@pytest.mark.parametrize(("hours", "number"), [(2.3, 0), (2.4, 1), (3.7, 2), (4.9, 2), (5.0, 3), (1000.0, MOST)])
def test_as_many_as_there_is_time_for(hours: float, number: int) -> None:
    assert fitting(hours, hours_of_one=1.0) == number
    assert fitting(10 * hours, hours_of_one=10.0) == number


def test_a_student_reads_with_its_teachers() -> None:
    assert runs_of(3) == pytest.approx(3 + 1 + 1)
