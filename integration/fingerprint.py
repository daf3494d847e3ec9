"""What a model computes with, as 32 bytes: content only, never a name of a model or a path.

Reading 50 GB takes a minute, so the digest of each file is remembered under the identity that the
file system gives it, and paid once.
"""

# mlx's stubs leave the arguments of eval and tree_flatten untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from blake3 import blake3
from mlx import nn
from mlx.utils import tree_flatten

from ..journal.errors import SettingsError
from ..restore.materialise import bytes_of

READ_NBYTES = 8 * 1024 * 1024

_WEIGHTS_DOMAIN = b"walkback weights 1"
_ADAPTER_DOMAIN = b"walkback adapter 1"
_PARAMETERS_DOMAIN = b"walkback parameters 1"
_STRUCTURE_DOMAIN = b"walkback structure v1"
_COMBINED_DOMAIN = b"walkback model v1"


def fingerprint_weights(model_dir: Path, memo: MutableMapping[str, bytes]) -> bytes:
    """32 bytes over config.json, every ``*.safetensors`` and every ``*.py`` beside it, by content.

    Code counts because a config can name a file of it as the model. SettingsError when the
    directory, the config or the weights are missing. OSError passes through.
    """
    return _fingerprint_directory(_WEIGHTS_DOMAIN, model_dir, "config.json", memo)


def fingerprint_adapter(adapter_dir: Path | None, memo: MutableMapping[str, bytes]) -> bytes:
    """32 bytes over an adapter's config and weights; None, no adapter, has a value of its own."""
    if adapter_dir is None:
        return _digest(_ADAPTER_DOMAIN, [])
    return _fingerprint_directory(_ADAPTER_DOMAIN, adapter_dir, "adapter_config.json", memo)


def fingerprint_parameters(model: nn.Module) -> bytes:
    """32 bytes over the class, the arguments and all parameters of a model that has no directory.

    Reads every parameter once, one at a time. Arguments count as far as ``model.args`` is a
    dataclass: two models can share weights and differ in, say, the base of their rotary embedding.
    """
    kind = type(model)
    args: Any = getattr(model, "args", None)
    fields = dataclasses.asdict(cast(Any, args)) if dataclasses.is_dataclass(args) else None
    parts = [
        f"{kind.__module__}.{kind.__qualname__}".encode(),
        json.dumps(fields, sort_keys=True, default=repr).encode(),
    ]
    for name, parameter in sorted_parameters(model):
        array = mx.contiguous(parameter)
        mx.eval(array)
        shape = ",".join(str(size) for size in array.shape)
        parts += [name.encode(), str(array.dtype).encode(), shape.encode()]
        parts.append(blake3(bytes_of(array)).digest())
    return _digest(_PARAMETERS_DOMAIN, parts)


def fingerprint_structure(model: nn.Module) -> bytes:
    """32 bytes over the names, dtypes and shapes of all parameters; reads none of them.

    Beside the weights' files it tells a model that is not what the files say: adapter layers that
    were loaded into it, a quantisation at load, a directory of another model.
    """
    parts: list[bytes] = []
    for name, parameter in sorted_parameters(model):
        shape = ",".join(str(size) for size in parameter.shape)
        parts += [name.encode(), str(parameter.dtype).encode(), shape.encode()]
    return _digest(_STRUCTURE_DOMAIN, parts)


def combined(weights: bytes, structure: bytes) -> bytes:
    """One fingerprint of a model's files and of its structure in memory."""
    return _digest(_COMBINED_DOMAIN, [weights, structure])


def sorted_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """All parameters with their dotted names, in the order of the names."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return sorted(flat, key=lambda item: item[0])


def _fingerprint_directory(
    domain: bytes, directory: Path, config_name: str, memo: MutableMapping[str, bytes]
) -> bytes:
    if not directory.is_dir():
        raise SettingsError(
            f"{directory} is no directory of a model or an adapter on this machine. For a hub's "
            "model pass the directory that it was downloaded to, or leave the directory out: then "
            "the parameters in memory are hashed"
        )
    if not (directory / config_name).is_file():
        raise SettingsError(f"{directory} has no {config_name}")
    # Copies made on a Mac leave ._name files behind, which are no weights.
    names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    shards = [name for name in names if name.endswith(".safetensors")]
    if not shards:
        raise SettingsError(f"{directory} has no *.safetensors file")
    code = [name for name in names if name.endswith(".py")]
    parts: list[bytes] = []
    for name in (config_name, *shards, *code):
        parts += [name.encode(), _file_digest(directory / name, memo)]
    return _digest(domain, parts)


def _file_digest(path: Path, memo: MutableMapping[str, bytes]) -> bytes:
    with path.open("rb", buffering=0) as file:
        key = _identity(file.fileno())
        if (known := memo.get(key)) is not None:
            return known
        hasher = blake3(max_threads=blake3.AUTO)
        chunk = memoryview(bytearray(READ_NBYTES))
        while count := file.readinto(chunk):
            hasher.update(chunk[:count])
        digest = hasher.digest()
        # A file that changed under the reader has no digest worth remembering.
        if _identity(file.fileno()) == key:
            memo[key] = digest
    return digest


def _identity(descriptor: int) -> str:
    at = os.fstat(descriptor)
    return f"{at.st_dev}:{at.st_ino}:{at.st_size}:{at.st_mtime_ns}:{at.st_ctime_ns}"


def _digest(domain: bytes, parts: list[bytes]) -> bytes:
    hasher = blake3()
    for part in (domain, *parts):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
