"""Token files → training samples, by arithmetic: no index is built, nothing is cached or shuffled in memory.

The path of a sample: a position of the run (one integer) → `order` or, for a mixture of sources, `mixed_order` (epoch
and index in the epoch) → `packed` (a slice of the token stream) → `batches` (the data-parallel rank that reads it) →
`objective` (inputs and labels). `data_plan` makes them from a configuration, `documents` maps samples to documents,
`spans` is span corruption, and `evaluation` reads the validation tokens. All in numpy; torch enters in `training/`.
"""

from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.data_plan import DataPlan
from zerokara.samples.evaluation import evaluation_batches
from zerokara.samples.mixed_order import MixedOrder
from zerokara.samples.objective import OBJECTIVES, Batch
from zerokara.samples.order import SampleOrder
from zerokara.samples.packed import PackedTokens

__all__ = [
    "OBJECTIVES",
    "Batch",
    "BatchLayout",
    "Batches",
    "DataPlan",
    "MixedOrder",
    "PackedTokens",
    "SampleOrder",
    "evaluation_batches",
]
