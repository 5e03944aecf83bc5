"""The machine a result was measured on: what it is, and how fast it multiplies and copies in this very invocation."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch


def facts(threads: int, *, short: bool = False) -> dict[str, Any]:
    """Names and numbers of this machine; rates are those of ``threads`` threads."""
    torch.set_num_threads(threads)
    size = 256 if short else 1024
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),
        "gemm_float32_gflops": round(gemm_rate(torch.float32, size), 1),
        "gemm_bfloat16_gflops": round(gemm_rate(torch.bfloat16, size), 1),
        "memory_gb_per_s": round(memory_bandwidth(2**22 if short else 2**26), 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def sentence(found: dict[str, Any]) -> str:
    return (
        f"{found['processor']}, {found['cores']} cores, {found['threads']} thread(s) pinned, torch {found['torch']}, "
        f"load {found['load_before']}; GEMM {found['gemm_float32_gflops']} (float32) and "
        f"{found['gemm_bfloat16_gflops']} (bfloat16) GFLOP/s, memory {found['memory_gb_per_s']} GB/s"
    )


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gemm_rate(dtype: torch.dtype, size: int) -> float:
    """GFLOP/s of a square matrix product."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return 2 * size**3 / best(lambda: a @ b) / 1e9


def memory_bandwidth(count: int) -> float:
    """GB/s read and written by a copy of ``count`` float32 numbers, which should be more than the caches hold."""
    source, target = torch.ones(count), torch.empty(count)
    return 2 * 4 * count / best(lambda: target.copy_(source)) / 1e9


def best(work: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the fastest of a few runs."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
