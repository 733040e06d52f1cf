"""Token files → training samples, by arithmetic: nothing is built, cached or shuffled in memory.

The way of a sample: a position of the run (one integer) → `order` or, where sources are mixed, `mixed_order` (epoch and
index in the epoch) → `packed` (a slice of the token stream) → `batches` (which process reads which) → `objective` (what
the model reads and must predict). `reading_plan` makes them from a configuration, `documents` tells which documents a
sample holds. `spans` makes gaps in a text. `evaluation` reads the validation tokens. All in numpy; torch enters in
`training/`.
"""

from zerokara.samples.batches import Batches, BatchPlan
from zerokara.samples.evaluation import evaluation_batches
from zerokara.samples.mixed_order import MixedOrder
from zerokara.samples.objective import OBJECTIVES, Batch
from zerokara.samples.order import SampleOrder
from zerokara.samples.packed import PackedTokens
from zerokara.samples.reading_plan import ReadingPlan

__all__ = [
    "OBJECTIVES",
    "Batch",
    "BatchPlan",
    "Batches",
    "MixedOrder",
    "PackedTokens",
    "ReadingPlan",
    "SampleOrder",
    "evaluation_batches",
]
