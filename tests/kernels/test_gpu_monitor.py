"""The GPU monitor beside a library that answers as NVML does."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ludus.kernels.device import GpuMonitor
from ludus.observe import definition_of

SOURCE = r"""
static int devices[4] = {0, 1, 2, 3};
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= 4) return 2;
    *handle = &devices[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) {
    if (name[0] != 'G') return 2;
    *handle = &devices[3];
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    rates[0] = 20 * (1 + *(int *)handle);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[2] = (1ULL << 30) * (1 + *(int *)handle);
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    for init in (0, 9):
        flags = ["-shared", "-fPIC", f"-DINIT={init}", "-o", str(folder / f"nvml{init}.so")]
        subprocess.run([compiler, *flags, str(folder / "nvml.c")], check=True)
    return folder


def sampled(library: Path, visible: str | None) -> dict[str, float]:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monitor = GpuMonitor.start(str(library / "nvml0.so"), seconds=0.001, variables=variables)
    assert monitor is not None
    try:
        deadline = time.monotonic() + 20
        while not (found := monitor.take()) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        monitor.close()
    return found


@pytest.mark.parametrize(
    ("visible", "memory"), [("0", 1.0), ("3", 4.0), ("GPU-abc", 4.0), ("1,nonsense", 2.0)]
)
def test_the_gpus_that_cuda_sees_are_measured(library: Path, visible: str, memory: float) -> None:
    assert sampled(library, visible) == {
        "gpu/utilisation": pytest.approx(0.2 * memory),
        "gpu/memory_gb": memory,
    }


def test_all_gpus_are_averaged_and_the_fullest_counts(library: Path) -> None:
    found = sampled(library, None)
    assert 0.2 <= found["gpu/utilisation"] <= 0.4 and found["gpu/memory_gb"] == 2.0
    assert all(definition_of(name) is not None for name in found)


def test_where_there_is_nothing_to_ask_nothing_is_measured(library: Path) -> None:
    assert GpuMonitor.start(str(library / "none.so")) is None
    assert GpuMonitor.start(str(library / "nvml9.so")) is None, "no driver is loaded"
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert GpuMonitor.start(str(library / "nvml0.so"), variables=none) is None
