"""The models: shapes, the border to megatron-core, loss. `shapes`, `parameters` and `loopback` need no torch."""
