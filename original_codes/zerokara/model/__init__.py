"""The models: shapes, the border to megatron-core, loss. `shapes` needs no torch."""
