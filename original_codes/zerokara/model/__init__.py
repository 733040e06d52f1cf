"""The models: shapes, the border to megatron-core, loss. `shapes` and `loss_chunks` need no torch."""
