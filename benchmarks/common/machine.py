"""The machine a result was measured on: what it is, and how fast it multiplies and copies in this very invocation."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def facts(threads: int, *, short: bool = False) -> dict[str, Any]:
    """Names and numbers of this machine; rates are those of ``threads`` threads."""
    torch.set_num_threads(threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor(),
        "instructions": instructions(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),
        **rates(short=short),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def rates(*, short: bool = False) -> dict[str, float]:
    """How fast the machine multiplies and copies at this moment, with the threads that torch has."""
    size = 256 if short else 1024
    return {
        "gemm_float32_gflops": round(gemm_rate(torch.float32, size), 1),
        "gemm_bfloat16_gflops": round(gemm_rate(torch.bfloat16, size), 1),
        "memory_gb_per_s": round(memory_bandwidth(2**22 if short else 2**26), 1),
    }


def sentence(found: dict[str, Any]) -> str:
    """What it is, and how fast it was before and, where that was measured, after."""

    def rate(name: str) -> str:
        return f"{found[name]}" + (f" then {found[f'{name}_after']}" if f"{name}_after" in found else "")

    vectors = f" ({found['instructions']})" if "instructions" in found else ""
    return (
        f"{found['processor']}{vectors}, {found['cores']} cores, {found['threads']} thread(s) a process, torch "
        f"{found['torch']}, load {found['load_before']} before; matrix products {rate('gemm_float32_gflops')} "
        f"(float32) and {rate('gemm_bfloat16_gflops')} (bfloat16) GFLOP/s, memory {rate('memory_gb_per_s')} GB/s"
    )


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def instructions() -> str:
    """The vector instructions that matter to matrix products, as far as the system tells them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next(line.split(":")[1].split() for line in file if line.startswith("flags"))
    except (OSError, StopIteration):
        return "unknown"
    return " ".join(flag for flag in INSTRUCTIONS if flag in flags) or "none of those asked for"


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
