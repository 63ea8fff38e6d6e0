"""Kernels are compiled for GPUs that are not here: Triton needs no device for that, only its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ludus.kernels import triton_adamw, triton_attention, triton_layers, triton_logprobs

def text(kernel, kinds, constants, capability):
    names = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=names, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]

numbers = dict.fromkeys(
    "window table_width rows heads kv_heads block_size size least count blocks STRIDE "
    "tokens width ranks chunk parts total rank width0 width1 width2 first0 first1 first2".split(), "i32"
)
floats = dict.fromkeys(
    "scaling softcap rate eps rest1 beta2 rest2 log_beta1 log_beta2 inverse".split(), "fp32"
)
states = dict.fromkeys(["Q", "KEYS", "VALUES", "OUT", "KEPT", "X"], "*bf16")
places = dict.fromkeys(["TABLES", "STARTS", "LENGTHS", "TENSORS", "SOUND"], "*i32")
tables = dict.fromkeys(["OFFSETS", "TABLE", "SIZES", "TOKENS"], "*i64")
sums = dict.fromkeys(
    "PART LSE DECAYS SCALE LOGITS TOP SUM MOMENT SHIFT DLOGPROB DOWN UP".split(), "*fp32"
)
kinds = {**numbers, **floats, **states, **places, **tables, **sums}
tiles = {"SIZE": 64, "HAS_CAP": True, "HAS_WINDOW": True}
for capability in (80, 90):
    for single in ({}, {"rows": 1, "kv_heads": 1}):  # Triton makes constants of arguments that are 1
        text(triton_attention._prefill_kernel, kinds, {**tiles, "ROWS": 64, "TILE": 64, **single}, capability)
    text(triton_attention._decode_kernel, kinds, {**tiles, "GROUP": 16, "TILE": 128, "PARTS": 4}, capability)
    half = {"GRAD": tl.bfloat16, "WEIGHT": tl.bfloat16, "ALIGNED": True, "CHUNK": 1 << 15, "BLOCK": 2048}
    ptx = text(triton_adamw._step, kinds, half, capability)
    text(triton_logprobs._summaries, kinds, {"KEEPS": True, "BLOCK": 4096}, capability)
    text(triton_logprobs._kept_gradient, kinds, {"BLOCK": 4096}, capability)
    for precision in ("ieee", "tf32"):
        small = {"TOKENS": 16, "DEPTH": 64, "PRECISION": precision}
        text(triton_layers._lora_inner, kinds, {**small, "RANKS": 64}, capability)
        for single in ({}, {"parts": 1}):
            adding = {**small, "DEPTH": 16, "COLUMNS": 64, "ADAPTERS": 3, **single}
            text(triton_layers._lora_add, kinds, adding, capability)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "memory is not read in pieces of 16 bytes"
"""


@pytest.mark.timeout(300)
def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
