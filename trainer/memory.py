"""How much memory a process holds, and how much of what there is that makes."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1 << 30
# Readings of which the largest over the ranks is the run's.
MEMORY = (
    "resident_memory_gb", "resident_memory_peak_gb", "host_memory_share", "gpu_memory_share", "gpu_memory_now_share",
)  # fmt: skip
WARN_SHARE = 0.8  # above it a longer text, a validation or another process may end the run


def memory_readings(device: torch.device) -> dict[str, float]:
    """This rank's memory, by the names of METRICS; the same names on every rank of a run.

    resident_memory_gb, resident_memory_peak_gb: of this process on the host, in GiB, the peak since it began.
    host_memory_share: of the machine's memory, or of what its container may have, in use by all processes.
    On CUDA also gpu_memory_share, the peak since the last call, and gpu_memory_now_share: of the whole device, as
    nvidia-smi counts it, so with the cache of torch's allocator and with whatever else is on the device. No call here
    waits for the device. The CUDA part was never measured.
    """
    readings = {"resident_memory_gb": resident_bytes() / GIB, "resident_memory_peak_gb": peak_resident_bytes() / GIB}
    if (share := host_memory_share()) is not None:
        readings["host_memory_share"] = share
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch gave back since its peak is free again by now; others are assumed to have held what they hold.
        given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        readings["gpu_memory_now_share"] = 1 - free / total
        readings["gpu_memory_share"] = min(1.0, 1 - (free - given_back) / total)
    return readings


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; its peak where the system does not say (macOS)."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return peak_resident_bytes()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most memory that this process has had in RAM: since it began, or since `forget_peak`."""
    try:
        return status_bytes("VmHWM")
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def status_bytes(name: str) -> int:
    """A number of /proc/self/status. Raises OSError or KeyError where the system has none."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


def forget_peak() -> bool:
    """Let `peak_resident_bytes` begin anew; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def host_memory_share(root: Path = Path("/")) -> float | None:
    """Share of the memory that is in use and cannot be taken back: of the machine, or of this container if that is
    nearer to its end. None where the system does not say.

    root: of the file system, for tests. The container's is that of cgroup v2 as seen from inside, or v1's.
    """
    shares = []
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        numbers = _meminfo(root)
        shares.append(1 - numbers["MemAvailable"] / numbers["MemTotal"])
    shares += [held / most for most, held in _containers(root) if most]
    return max(shares, default=None)


def _meminfo(root: Path) -> dict[str, int]:
    """Numbers of /proc/meminfo, in KiB."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    return {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}


def _containers(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, in use) of this container, in bytes; nothing where it has none."""
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # "max", which is no number, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            most = int((root / folder / limit).read_text(encoding="ascii"))
            held = int((root / folder / used).read_text(encoding="ascii"))
            lines = (root / folder / "memory.stat").read_text(encoding="ascii").splitlines()
            # Files that were only read are what the kernel lets go first.
            yield most, held - dict(map(int_pair, lines)).get(cache, 0)


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken: of the GPU, or of the machine or container; None where no one says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        numbers = _meminfo(Path("/"))
    except (OSError, ValueError, IndexError):
        return None
    left = [numbers["MemAvailable"] * 1024] if "MemAvailable" in numbers else []
    left += [most - held for most, held in _containers(Path("/"))]
    return min(left, default=None)


def int_pair(line: str) -> tuple[str, int]:
    """("inactive_file", 4096) of a line of memory.stat."""
    name, value = line.split()
    return name, int(value)
