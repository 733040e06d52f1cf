"""The training samples of a run and their order: of a corpus, or of the examples of a task."""

from __future__ import annotations

from zerokara.samples.data_plan import DataPlan
from zerokara.samples.example_data import ExampleData

Reading = DataPlan | ExampleData
