"""Token files → training samples, by arithmetic: no index is built, nothing is cached or shuffled in memory.

The path of a sample: a position of the run (one integer) → `order` (epoch and index in the epoch) → `packed_tokens` (a
slice of the token stream) → `batches` (the data-parallel rank that reads it; and the validation tokens) → `objective`
(inputs and labels). All in numpy; torch enters in `training/`. Fine-tuning goes the same way with `packed_examples`
(rows of whole examples, chosen by `bin_packing`, and their objective) in place of `packed_tokens`.
"""
