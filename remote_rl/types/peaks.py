"""Contract: what makers promise of their accelerators, by the names these give themselves (imports
work).

Operations a second of one device for dense products (without the 2:4 sparsity that datasheets
double them by), at the largest power that the maker names. Sources, all public:
NVIDIA's datasheets "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "L40S",
"L4", "A10", "DGX B200", "GB200 NVL72"; AMD's data sheets "Instinct MI300X accelerator" and
"Instinct MI325X accelerator". TF32 is left out: torch does not use it unless it is told to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .work import Devices

#: words of the name, all of which it holds -> (bfloat16 or float16 with float32 sums, float32
#: without TF32); a name takes the first that fits, so the special stands before the general
_PEAKS: tuple[tuple[frozenset[str], tuple[float, float]], ...] = tuple(
    (frozenset(words.split()), peaks)
    for words, peaks in (
        ("NVIDIA A100", (312e12, 19.5e12)),
        ("NVIDIA A800", (312e12, 19.5e12)),
        ("NVIDIA A10", (125e12, 31.2e12)),
        ("NVIDIA H100 PCIE", (756e12, 51e12)),
        ("NVIDIA H100 NVL", (835e12, 60e12)),
        ("NVIDIA H100", (989e12, 67e12)),
        ("NVIDIA H800 PCIE", (756e12, 51e12)),
        ("NVIDIA H800", (989e12, 67e12)),
        ("NVIDIA H200 NVL", (835e12, 60e12)),
        ("NVIDIA H200", (989e12, 67e12)),
        ("NVIDIA GH200", (989e12, 67e12)),
        ("NVIDIA GB200", (2500e12, 80e12)),
        ("NVIDIA B200", (2250e12, 75e12)),
        ("NVIDIA L40S", (362e12, 91.6e12)),
        ("NVIDIA L4", (121e12, 30.3e12)),
        ("AMD MI300X", (1307e12, 163.4e12)),
        ("AMD MI325X", (1307e12, 163.4e12)),
    )
)
_COLUMNS: Mapping[str, int] = {"bfloat16": 0, "float16": 0, "float32": 1}


def devices(kind: str, count: int, dtype: str, total: int | None = None) -> Devices:
    """`Devices` with the peak of the table, or the reason why there is none.

    kind: as `torch.cuda.get_device_name` gives it, or "cpu". count: those that train, total: those
    of the whole run, None is the same. dtype: of the products in training.
    """
    peak, reason = _peak(kind, dtype)
    return Devices(
        kind=kind,
        count=count,
        total=count if total is None else total,
        dtype=dtype,
        peak_flops=peak,
        reason=reason,
    )


def _peak(kind: str, dtype: str) -> tuple[float | None, str | None]:
    words = frozenset(re.findall(r"[A-Z0-9]+", kind.upper()))
    if words == {"CPU"}:
        return None, "the run computes on CPUs, whose peak is not known"
    if "MIG" in words:
        return None, f"{kind!r} is a slice of a GPU, whose share of the peak is not known"
    for wanted, peaks in _PEAKS:
        if wanted <= words:
            if dtype not in _COLUMNS:
                return None, f"the peak of {kind!r} for {dtype} is not known here"
            return peaks[_COLUMNS[dtype]], None
    return None, f"the peak of {kind!r} is not known here"
