"""A fingerprint covers content and nothing else, and a file is read once."""

# mlx-lm leaves the model's class untyped.
# pyright: reportUnknownVariableType=false

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model
from zoo import CONFIGS, DTYPES, build

from walkback.integration.fingerprint import (
    fingerprint_adapter,
    fingerprint_parameters,
    fingerprint_weights,
)
from walkback.integration.tiny import TINY_QWEN3_5, write_tiny_model
from walkback.journal.errors import SettingsError


def model_dir(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "model-1.safetensors").write_bytes(b"one")
    (path / "model-2.safetensors").write_bytes(b"two")
    return path


def test_the_name_and_place_of_a_model_do_not_matter(tmp_path: Path) -> None:
    here, there = model_dir(tmp_path / "here"), tmp_path / "there"
    shutil.copytree(here, there)
    (there / "README.md").write_text("another")
    (there / "._model-1.safetensors").write_text("left behind by a Mac")

    assert fingerprint_weights(here, {}) == fingerprint_weights(there, {})
    assert len(fingerprint_weights(here, {})) == 32


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors", "model-2.safetensors"])
def test_one_changed_byte_of_any_file_changes_the_fingerprint(name: str, tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    before = fingerprint_weights(path, {})

    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)

    assert fingerprint_weights(path, {}) != before


def test_shards_with_their_contents_swapped_are_another_model(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    before = fingerprint_weights(path, {})

    (path / "model-1.safetensors").write_bytes(b"two")
    (path / "model-2.safetensors").write_bytes(b"one")

    assert fingerprint_weights(path, {}) != before


def test_bytes_moved_from_one_shard_to_the_next_are_another_model(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    before = fingerprint_weights(path, {})

    (path / "model-1.safetensors").write_bytes(b"onet")
    (path / "model-2.safetensors").write_bytes(b"wo")

    assert fingerprint_weights(path, {}) != before


def test_a_shard_of_another_name_is_another_model(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    before = fingerprint_weights(path, {})

    (path / "model-2.safetensors").rename(path / "model-3.safetensors")

    assert fingerprint_weights(path, {}) != before


def test_code_beside_the_weights_counts(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    before = fingerprint_weights(path, {})

    (path / "modeling.py").write_text("class Model: ...")

    assert fingerprint_weights(path, {}) != before


def test_a_file_is_read_once_for_each_identity(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    memo: dict[str, bytes] = {}
    first = fingerprint_weights(path, memo)

    second = fingerprint_weights(path, dict.fromkeys(memo, b"remembered"))

    assert len(memo) == 3
    assert fingerprint_weights(path, memo) == first
    assert second != first


def test_a_rewritten_file_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    memo: dict[str, bytes] = {}
    before = fingerprint_weights(path, memo)
    shard = path / "model-1.safetensors"
    status = shard.stat()

    # The time of change ticks every few milliseconds on some file systems.
    while shard.stat().st_ctime_ns == status.st_ctime_ns:
        shard.write_bytes(b"eno")
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert fingerprint_weights(path, memo) != before


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("model",), "no directory"),
        (("model/config.json",), "no config.json"),
        (("model/model-1.safetensors", "model/model-2.safetensors"), "no \\*.safetensors"),
    ],
)
def test_a_missing_part_is_an_error_that_names_it(
    missing: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = model_dir(tmp_path / "model")
    for name in missing:
        target = tmp_path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    with pytest.raises(SettingsError, match=message):
        fingerprint_weights(path, {})


def test_no_adapter_differs_from_every_adapter(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapters.safetensors").write_bytes(b"")

    assert fingerprint_adapter(None, {}) == fingerprint_adapter(None, {})
    assert fingerprint_adapter(None, {}) != fingerprint_adapter(path, {})


def test_an_adapter_is_never_mistaken_for_weights(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    (path / "adapter_config.json").write_bytes((path / "config.json").read_bytes())

    assert fingerprint_adapter(path, {}) != fingerprint_weights(path, {})


def test_equal_models_in_memory_have_one_fingerprint_and_others_another() -> None:
    assert fingerprint_parameters(build("lfm2")) == fingerprint_parameters(build("lfm2"))
    assert fingerprint_parameters(build("lfm2")) != fingerprint_parameters(build("lfm2", seed=1))


def test_a_model_of_other_arguments_with_the_same_weights_has_another_fingerprint() -> None:
    other: Any = build("llama")
    before = fingerprint_parameters(other)

    other.args.rope_theta *= 2

    assert fingerprint_parameters(other) != before


def test_a_tiny_model_is_written_in_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tiny_model(tmp_path / name, config=TINY_QWEN3_5)

    for name in ("config.json", "model.safetensors"):
        first, second = (tmp_path / each / name for each in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
    assert json.loads((tmp_path / "first" / "config.json").read_text())["model_type"] == "qwen3_5"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_model_loads_with_the_weights_that_were_written(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, config=CONFIGS[name], dtype=DTYPES[name])

    loaded, _ = load_model(tmp_path)

    assert fingerprint_parameters(loaded) == fingerprint_parameters(build(name))
