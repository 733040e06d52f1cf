"""The models: shapes, the megatron-core adapter, attention, loss. Only `shapes` can be imported without torch."""

import warnings

# On import megatron-core says what it would use if Apex and Transformer Engine were there; neither is asked for here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
