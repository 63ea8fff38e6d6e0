"""The compiled kernels run on the GPU where there is one, and in Triton's interpreter otherwise."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Read when the kernels are imported, which on a machine without a GPU nothing but these tests does.
    os.environ["TRITON_INTERPRET"] = "1"
