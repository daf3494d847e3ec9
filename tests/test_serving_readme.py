"""What README says of ``walkback serve`` is so: its flags, their variables and their defaults."""

import re
from dataclasses import fields
from pathlib import Path

from walkback.integration.serving.options import (
    ServeOptions,
    make_parser,
    parse_options,
    parse_size,
)

README = Path(__file__).parent.parent / "README.md"
# In words there: no value that one could write.
CHOSEN_BY_THE_CACHE = {"ssd_max", "hot_max", "pending_max"}


def section() -> str:
    _, _, rest = README.read_text().partition("### Serve\n")
    return rest.partition("\n### ")[0]


def flags() -> dict[str, tuple[str, str]]:
    """The variable and the default beside each flag of the table."""
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `([A-Z_]+)` \| (.*?) \|", section(), re.MULTILINE)
    return {flag: (variable, default) for flag, variable, default in rows}


def test_the_table_has_every_flag_with_its_variable() -> None:
    words = make_parser({}).format_help()
    known = dict(re.findall(r"(--[a-z-]+)[^(]*\((WALKBACK_[A-Z_]+)\)", words))

    assert len(known) == len(fields(ServeOptions))
    assert {flag: variable for flag, (variable, _) in flags().items()} == known


def test_the_defaults_are_those_of_a_server_that_was_told_nothing() -> None:
    options, _ = parse_options([], {})

    for flag, (_, shown) in flags().items():
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(options, name)
        value = re.findall(r"`([^`]*)`", shown)
        match default:
            case None:
                assert name in CHOSEN_BY_THE_CACHE
            case bool():
                assert (shown, default) == ("off", False)
            case int():
                assert parse_size(value[-1]) == default
            case Path():
                assert Path(value[0]) == default
            case _:
                assert (shown, default) == ("none", "")


def test_settings_carried_over_from_omlx_are_taken_as_they_are_written() -> None:
    carried = re.findall(r"\| `(\w+: \S+)` \| `(--\S+) (\S+)`", section())

    assert len(carried) == 3
    for theirs, flag, value in carried:
        options, _ = parse_options([flag, value], {})
        name = flag.removeprefix("--").replace("-", "_")
        assert theirs.endswith(f": {value}")
        assert getattr(options, name) == parse_size(value)
