"""The forward pass of Llama-like decoders over their own parameters, in few kernels.

It computes what the Hugging Face module computes, from the same parameters, and serves engine and trainer
alike. What it does not recognise stays with the module's own forward.
"""

from ludus.engine.fused.blueprint import Blueprint, blueprint_of, distrust, unrecognised
from ludus.engine.fused.forward import fused_hidden_states
from ludus.engine.fused.joining import is_joined, join
from ludus.engine.fused.projection import joint_linear

__all__ = [
    "Blueprint",
    "blueprint_of",
    "distrust",
    "fused_hidden_states",
    "is_joined",
    "join",
    "joint_linear",
    "unrecognised",
]
