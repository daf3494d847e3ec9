"""The options of ``walkback serve``: ours, from flags and the environment; others are mlx-lm's."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...journal.errors import SettingsError
from ...store.settings import GIB

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
ENVIRONMENT_PREFIX = "WALKBACK_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server does with its cache. Sizes are in bytes; None leaves a choice to the cache."""

    cache_dir: Path
    ssd_max: int | None = None
    hot_max: int | None = None
    pending_max: int | None = None
    disk_floor: int = 10 * GIB
    block_tokens: int = 256
    checkpoint_tokens: int = 2048
    salt: str = ""
    read_only: bool = False
    unsafe_batching: bool = False
    off: bool = False


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[ServeOptions, list[str]]:
    """Our options, and the arguments that are left for mlx-lm's server.

    A flag wins over its environment variable. mlx-lm's prefill step is made our stride, since
    prefill stops at checkpoints. SettingsError when the two were asked to differ.
    """
    parser = make_parser(environment)
    found, rest = parser.parse_known_args(list(arguments))
    _require_model(_flags_of_mlx_lm(rest).model)
    checkpoint_tokens: int = found.checkpoint_tokens or found.prefill_step_size or 2048
    if found.prefill_step_size not in (None, checkpoint_tokens):
        raise SettingsError(
            f"--prefill-step-size is {found.prefill_step_size} and --checkpoint-tokens "
            f"{checkpoint_tokens}: prefill stops at checkpoints, so give one of them"
        )
    options = ServeOptions(
        cache_dir=found.cache_dir,
        ssd_max=found.ssd_max,
        hot_max=found.hot_max,
        pending_max=found.pending_max,
        disk_floor=found.disk_floor,
        block_tokens=found.block_tokens,
        checkpoint_tokens=checkpoint_tokens,
        salt=found.salt,
        read_only=found.read_only,
        unsafe_batching=found.unsafe_batching,
        off=found.off,
    )
    return options, [*rest, "--prefill-step-size", str(checkpoint_tokens)]


def make_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of our flags, with defaults from the environment."""
    parser = argparse.ArgumentParser(
        prog="walkback serve",
        description="mlx-lm's server over a cache on disk. Its own flags, which are all taken, "
        "follow below. Sizes are as 128G, 512MB or bytes.",
        add_help=False,
        allow_abbrev=False,
    )
    own = parser.add_argument_group("walkback")

    def add(flag: str, words: str, **options: Any) -> None:
        name = ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        value = environment.get(name, "")
        if options.get("action") == "store_true":
            options["default"] = _switch(name, value)
        elif value:
            options["default"] = _converted(name, value, options.get("type", str))
        own.add_argument(flag, help=f"{words} ({name})", **options)

    add(
        "--cache-dir",
        "where the cache is, or is made: ~/.walkback",
        type=Path,
        default=Path("~/.walkback"),
    )
    add("--ssd-max", "what it may take of the disk: a quarter of what is free", type=parse_size)
    add("--hot-max", "what caches in RAM may take: a quarter of what is left", type=parse_size)
    add(
        "--pending-max",
        "memory that may wait for the disk: two checkpoints, at least 256M",
        type=parse_size,
    )
    add(
        "--disk-floor",
        "what the volume keeps free, or nothing is stored: 10G",
        type=parse_size,
        default=10 * GIB,
    )
    add("--block-tokens", "KV is cut in blocks of so many tokens: 256", type=int, default=256)
    add(
        "--checkpoint-tokens",
        "state is kept every so many tokens, a multiple of --block-tokens; it is the prefill step "
        "too: 2048",
        type=int,
    )
    add("--salt", "keeps tenants apart: none", default="")
    add("--read-only", "restore prompts, and store none", action="store_true")
    add(
        "--unsafe-batching",
        "prefill prompts of unlike length together where padding spoils the state; stores nothing",
        action="store_true",
    )
    add("--off", "serve as mlx-lm does, and open no cache", action="store_true")
    parser.add_argument("--prefill-step-size", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def parse_size(text: str) -> int:
    """Bytes of ``128G``, ``1.5GiB``, ``512mb`` or ``1024``; units are powers of 1024."""
    unit = text.strip().upper().removesuffix("B").removesuffix("I")
    number = unit.rstrip("KMGT")
    try:
        nbytes = int(float(number) * _UNITS[unit[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 128G or 512MB") from None
    if nbytes < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than nothing")
    return nbytes


def size_text(nbytes: int) -> str:
    """A size as people write it, and as ``parse_size`` reads it: ``1.5G``, ``512M``, ``0``."""
    for unit, factor in reversed(_UNITS.items()):
        if nbytes >= factor and unit:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + unit
    return str(nbytes)


def address_of(arguments: Sequence[str]) -> tuple[str, str]:
    """The host and the port on which mlx-lm's server will listen, as they are written."""
    found = _flags_of_mlx_lm(arguments)
    return found.host, found.port


def _flags_of_mlx_lm(arguments: Sequence[str]) -> argparse.Namespace:
    """Those that are looked at before its server starts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8080")
    return parser.parse_known_args(list(arguments))[0]


def _require_model(model: str | None) -> None:
    """SettingsError for a path that is not there: mlx-lm would look for it at a hub."""
    if model is not None and model.startswith((".", "/", "~")):
        path = Path(model).expanduser()
        if not path.is_dir():
            raise SettingsError(f"--model {model} is no directory here")


def _converted(name: str, text: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise SettingsError(f"{name} is {text!r}: {error}") from None


def _switch(name: str, text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise SettingsError(f"{name} is {text!r}; it must be 1 or 0")
    return text.lower() in _TRUE
