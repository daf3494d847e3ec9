"""Events as bytes: they come back as they were, or not at all."""

from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal import chain
from walkback.journal.codec import EVENT_TYPES, VERSION, decode, encode
from walkback.journal.errors import FormatError, JournalDamagedError
from walkback.journal.events import Event, Pinned, Record

st.register_type_strategy(float, st.floats(allow_nan=False))


def envelope(event: Event, sequence: int = 7) -> Record:
    return Record(sequence=sequence, wall_ns=1_700_000_000_000_000_000, epoch=2, event=event)


def pinned_fields(**changed: Any) -> list[Any]:
    """The decoded array of an event, for taking apart."""
    fields: list[Any] = cbor2.loads(encode(envelope(Pinned(key=b"k"))))
    for index, value in changed.items():
        fields[int(index.removeprefix("at_"))] = value
    return fields


@settings(max_examples=20)
@pytest.mark.parametrize("event_type", EVENT_TYPES, ids=lambda each: each.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(event_type: type[Event], data: st.DataObject) -> None:
    record = envelope(data.draw(st.builds(event_type)))

    back = decode(encode(record))

    assert back == record
    assert repr(back) == repr(record), "an enum came back as a plain value"


def test_no_two_events_share_a_tag() -> None:
    tags = [each.TAG for each in EVENT_TYPES]

    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(pinned_fields(at_0=VERSION + 1), id="a newer version"),
        pytest.param(pinned_fields(at_1=9999), id="an unknown tag"),
        pytest.param([*pinned_fields(), b"new"], id="a field more"),
    ],
)
def test_what_a_newer_walkback_wrote_is_refused(fields: list[Any]) -> None:
    with pytest.raises(FormatError, match="Upgrade"):
        decode(cbor2.dumps(fields))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="no CBOR"),
        pytest.param(cbor2.dumps(5), id="no array"),
        pytest.param(cbor2.dumps([1, 42]), id="half an envelope"),
        pytest.param(cbor2.dumps(pinned_fields()[:-1]), id="a field less"),
        pytest.param(cbor2.dumps(pinned_fields(at_5="text")), id="a field of another type"),
    ],
)
def test_what_is_no_event_is_damage(data: bytes) -> None:
    with pytest.raises(JournalDamagedError):
        decode(data)


@given(data=st.data())
def test_no_altered_event_passes_its_link(data: st.DataObject) -> None:
    event_type = data.draw(st.sampled_from(EVENT_TYPES))
    encoded = encode(envelope(data.draw(st.builds(event_type)), sequence=1))
    stored = bytearray(encoded + chain.link_of(chain.FIRST_LINK, encoded))
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    stored[bit // 8] ^= 1 << bit % 8
    entry = (chain.sequence_key(1), bytes(stored))

    with pytest.raises(JournalDamagedError):
        list(chain.linked([entry], first=1, previous=chain.FIRST_LINK))


@given(data=st.data())
def test_no_shortened_event_passes_its_link(data: st.DataObject) -> None:
    event_type = data.draw(st.sampled_from(EVENT_TYPES))
    encoded = encode(envelope(data.draw(st.builds(event_type)), sequence=1))
    stored = encoded + chain.link_of(chain.FIRST_LINK, encoded)
    entry = (chain.sequence_key(1), stored[: data.draw(st.integers(0, len(stored) - 1))])

    with pytest.raises(JournalDamagedError):
        list(chain.linked([entry], first=1, previous=chain.FIRST_LINK))
