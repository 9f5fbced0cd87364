"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def environment() -> dict[str, str | int | None]:
    """Versions, processor and device: enough to compare two reports, nothing that names a machine."""
    return {
        "draftgather": _version("draftgather"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
