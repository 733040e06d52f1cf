"""Where tests/gpu runs: on a GPU, joined by NCCL; or rehearsed on a CPU, which shows that the tests themselves work.

ZEROKARA_REHEARSE_GPU_TESTS=1 rehearses: all but the tests marked slow then run on a CPU, in fp32 and joined by gloo.
"""

import os

import torch

REHEARSED = os.environ.get("ZEROKARA_REHEARSE_GPU_TESTS") == "1"
DEVICE = torch.device("cpu") if REHEARSED else torch.device("cuda", 0)
BACKEND = "gloo" if REHEARSED else "nccl"
PRECISION = "fp32" if REHEARSED else "bf16"
DTYPE = torch.float32 if REHEARSED else torch.bfloat16
