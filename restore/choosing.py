"""What a lookup chooses under the store's lock, and what it knows of a prefix that is not read."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..journal.words import MissReason
from ..store.lookup import Lease, Located, View
from ..store.store import MutableStore
from .candidates import Candidate, Match, match, matched_blocks
from .identity import Chain, difference
from .layout import Layout
from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A prompt that wants to resume: its chain, and what its payloads must look like."""

    request: int
    namespace: bytes
    fields: tuple[tuple[str, str], ...]
    layout: Layout
    chain: Chain
    plan: Plan
    # What the caller has without a restore: only what is deeper is worth reading.
    beyond: int = 0
    # Where the cache takes another form than this layout's: only what ends before is of use.
    below: int | None = None
    # From where on the cache has this form: what ends before it was captured there.
    form_start: int = 0
    # What to look for if this finds nothing.
    otherwise: "Lookup | None" = None

    @property
    def prompt_tokens(self) -> int:
        return self.chain.token_count

    def plan_digest_of(self, end: int) -> bytes:
        """The digest of this prompt's plan up to the stop that captures the block ending there."""
        return self.plan.digest_of(max(end, self.form_start))


@dataclass(frozen=True, slots=True, kw_only=True)
class NotResumed:
    """A miss with its reason.

    ``junction``, as in a restore, is a position beyond the endpoint to which other prompts share
    the blocks of this one and then part ways: a state kept there would serve the next of them.
    """

    reason: MissReason
    detail: str
    walkbacks: int = 0
    # The end of the whole blocks that matched.
    matched_tokens: int = 0
    junction: int | None = None


class Choice(NamedTuple):
    """What matched, why nothing of it can be resumed, and where its blocks part from others'."""

    found: Match
    miss: NotResumed | None
    junction: int | None


def choose(view: View, lookup: Lookup, refused: Set[bytes]) -> tuple[Choice, Sequence[Located]]:
    """The longest candidate that is left, or why there is none, and what a lease must keep."""
    found = _match(view, lookup, refused)
    junction = _junction(view, lookup, found)
    candidate = found.candidate
    if candidate is None:
        return Choice(found, _why(view, lookup, found), junction), ()
    located = [*candidate.blocks, *([candidate.sidecar] if candidate.sidecar else [])]
    return Choice(found, None, junction), located


def endpoint_of(view: View, lookup: Lookup) -> int:
    """The endpoint that a restore would begin with; 0 without one."""
    each: Lookup | None = lookup
    while each is not None:
        if (candidate := _match(view, each).candidate) is not None:
            return candidate.endpoint
        each = each.otherwise
    return 0


def _match(view: View, lookup: Lookup, refused: Set[bytes] = frozenset()) -> Match:
    return match(
        view,
        lookup.chain,
        needs_sidecar=lookup.layout.has_point_state,
        refused=refused,
        beyond=lookup.beyond,
        below=lookup.below,
    )


def _junction(view: View, lookup: Lookup, found: Match) -> int | None:
    """Where the blocks of this prompt end and those of others go on, to a block."""
    if not found.blocks or not lookup.layout.has_point_state:
        return None
    last = found.blocks[-1]
    is_parting = len(found.blocks) < len(lookup.chain.links) and view.goes_on(last.key)
    return last.end if is_parting else None


def _why(view: View, lookup: Lookup, found: Match) -> NotResumed:
    """Why nothing of a prompt can be restored."""
    if lookup.beyond:
        detail = f"memory holds {lookup.beyond} tokens of it, and nothing deeper is stored"
        return NotResumed(reason=MissReason.IN_MEMORY, detail=detail)
    if lookup.prompt_tokens <= lookup.chain.block_tokens:
        detail = f"a prompt of {lookup.prompt_tokens} tokens has no whole block before its last"
        return NotResumed(reason=MissReason.TOO_SHORT, detail=detail)
    if found.blocks:
        detail = f"{found.blocks[-1].end} tokens match, but no checkpoint stands among them"
        return NotResumed(reason=MissReason.NO_CHECKPOINT, detail=detail)
    if not view.block_count():
        return NotResumed(reason=MissReason.EMPTY, detail="nothing is stored")
    others = {
        namespace: fields
        for namespace, fields in view.namespaces().items()
        if namespace != lookup.namespace and view.block_count(namespace)
    }
    if not view.block_count(lookup.namespace) and others:
        nearest = min((difference(lookup.fields, each) for each in others.values()), key=len)
        detail = f"what is stored differs in {', '.join(nearest)}"
        return NotResumed(reason=MissReason.OTHER_NAMESPACE, detail=detail)
    return NotResumed(reason=MissReason.UNSEEN, detail="no stored prompt begins like this one")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """What is stored of a prefix that nobody has to read: the end of its full blocks and, if its
    last boundary is there too, of what plan that is and its Committed's sequence.

    ``held`` keeps its last block.
    """

    end: int
    plan_digest: bytes | None
    sequence: int | None
    held: Lease | None


def stored_prefix(
    store: MutableStore, chain: Chain, endpoint: int, *, needs_sidecar: bool
) -> StoredPrefix:
    """Look for the blocks of a prefix and hold the last one. CacheClosedError after the close.

    What a restore would have resumed from is touched: a conversation that is served from memory
    must not lose its place on disk for that.
    """

    def choose(
        view: View,
    ) -> tuple[tuple[StoredPrefix, Candidate | None], Sequence[Located]]:
        blocks = matched_blocks(view, chain.between(0, endpoint))
        key = chain.ending_at(endpoint).key
        tip = view.sidecar(key) or view.block(key)
        prefix = StoredPrefix(
            end=blocks[-1].end if blocks else 0,
            plan_digest=None if tip is None else tip.plan_digest,
            sequence=None if tip is None else tip.sequence or None,
            held=None,
        )
        found = match(view, chain, needs_sidecar=needs_sidecar)
        return (prefix, found.candidate), blocks[-1:]

    (prefix, candidate), lease = store.choose(choose)
    if candidate is not None:
        store.touch(candidate.blocks[-1].key)
    held = store.hold(lease.kept.keys)
    store.release(lease)
    return replace(prefix, held=held)
