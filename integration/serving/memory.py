"""What caches in RAM may take of the machine's memory, unless the user says so."""

# mlx's stubs leave what they return untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
from typing import Any

import mlx.core as mx

from ..fingerprint import sorted_parameters

# The rest is for the rows that are being served, their activations and everybody else.
SHARE = 4


def hot_bytes_for(model: Any) -> int:
    """The default bound of the tier in RAM: a quarter of what the model's weights leave free."""
    return max(working_set_bytes() - weight_bytes(model), 0) // SHARE


def weight_bytes(model: Any) -> int:
    """What the parameters of a model take."""
    return sum(array.nbytes for _, array in sorted_parameters(model))


def working_set_bytes() -> int:
    """What the device may keep resident: as Metal recommends, elsewhere all of the memory."""
    device: Any = mx.device_info()
    recommended: int | None = device.get("max_recommended_working_set_size")
    return recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
