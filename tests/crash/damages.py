"""What is done to a cache's files: bytes flipped, ends cut off, pages zeroed, files exchanged.

Every damage is a function of the files before it, and has a name that is the same in every run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from .specimen import JOURNAL, Earlier, Specimen, Tree

PAGE_BYTES = 4096

# What stands under these names afterwards; None if nothing does.
Changes = dict[str, bytes | None]
Change = Callable[[Tree], Changes]

_GARBAGE = bytes(range(256)) * 16
_HEADER_BYTES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A change to the files of a cache.

    ``earlier`` is what came back, if nothing is left that tells of it. ``is_refused`` says that the
    cache must not open.
    """

    name: str
    change: Change
    is_while_open: bool = False
    is_refused: bool = False
    earlier: Earlier | None = None


# Of one file.


def flip(path: str, offset: int, bits: int, files: Tree) -> Changes:
    content = bytearray(files[path])
    content[offset] ^= bits
    return {path: bytes(content)}


def truncate(path: str, nbytes: int, files: Tree) -> Changes:
    return {path: files[path][:nbytes]}


def zero(path: str, page: int, files: Tree) -> Changes:
    content = files[path]
    start, end = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
    return {path: content[:start] + bytes(len(content[start:end])) + content[end:]}


def grow(path: str, nbytes: int, files: Tree) -> Changes:
    return {path: files[path] + _GARBAGE[:nbytes]}


def remove(path: str, files: Tree) -> Changes:
    return {path: None}


def write(path: str, content: bytes, files: Tree) -> Changes:
    return {path: content}


def exchange(one: str, other: str, files: Tree) -> Changes:
    return {one: files[other], other: files[one]}


def both(one: Change, other: Change, files: Tree) -> Changes:
    changes = one(files)
    return changes | other({**files, **{path: each or b"" for path, each in changes.items()}})


def _flips(path: str, offsets: range, *, bits: tuple[int, ...] = ()) -> Iterator[Damage]:
    """Flip one bit at each offset, another one at the next, or all of ``bits`` at each."""
    for offset in offsets:
        for mask in bits or (1 << offset % 8,):
            name = f"byte {offset} of {path} ^ {mask}"
            yield Damage(name=name, change=partial(flip, path, offset, mask))


def _truncations(path: str, sizes: range | tuple[int, ...]) -> Iterator[Damage]:
    for size in sizes:
        yield Damage(name=f"{path} cut off at {size}", change=partial(truncate, path, size))


def _pages(path: str, nbytes: int) -> Iterator[Damage]:
    for page in range(-(-nbytes // PAGE_BYTES)):
        yield Damage(name=f"page {page} of {path} zeroed", change=partial(zero, path, page))


def _wholes(path: str) -> Iterator[Damage]:
    """What may happen to a file as a whole."""
    yield Damage(name=f"{path} removed", change=partial(remove, path))
    yield Damage(name=f"{path} empty", change=partial(truncate, path, 0))
    for nbytes in (1, PAGE_BYTES):
        yield Damage(name=f"{path} with {nbytes} more bytes", change=partial(grow, path, nbytes))


# Of each kind of file.


def of_payloads(specimen: Specimen, *, step: int) -> Iterator[Damage]:
    """Headers and data are small in here; between them are only spaces, of which some."""
    for path in specimen.payloads:
        nbytes = len(specimen.files[path])
        data = nbytes - nbytes % PAGE_BYTES
        yield from _flips(path, range(0, _HEADER_BYTES, step))
        yield from _flips(path, range(_HEADER_BYTES, data, 200 * step))
        yield from _flips(path, range(data, nbytes, step))
        yield from _truncations(path, (1, 8, 100, data - 1, data, data + 1, nbytes - 1))
        yield from _pages(path, nbytes)
        yield from _wholes(path)


def of_store(specimen: Specimen) -> Iterator[Damage]:
    """Without the STORE that it was made with a cache does not open."""
    nbytes = len(specimen.files["STORE"])
    damages = [
        *_flips("STORE", range(nbytes), bits=tuple(1 << bit for bit in range(8))),
        *_truncations("STORE", range(nbytes)),
        Damage(name="STORE removed", change=partial(remove, "STORE")),
    ]
    for path, content in specimen.foreign.items():
        change = partial(write, path, content)
        damages.append(Damage(name=f"{path} of another cache", change=change))
    yield from (replace(each, is_refused=True) for each in damages)
    yield Damage(name="STORE with more bytes", change=partial(grow, "STORE", 100))


def of_head(specimen: Specimen) -> Iterator[Damage]:
    slot = range(0, 512)
    yield from _flips("HEAD", slot, bits=(1, 128))
    yield from _flips("HEAD", range(PAGE_BYTES, PAGE_BYTES + 512), bits=(1, 128))
    yield from _flips("HEAD", range(512, PAGE_BYTES, 500))
    yield from _truncations("HEAD", range(1, 2 * PAGE_BYTES, 100))
    yield from _pages("HEAD", 2 * PAGE_BYTES)
    yield from _wholes("HEAD")
    yield Damage(name="HEAD is zeros", change=partial(write, "HEAD", bytes(2 * PAGE_BYTES)))


def of_owner(specimen: Specimen) -> Iterator[Damage]:
    nbytes = len(specimen.files["OWNER"])
    yield from _flips("OWNER", range(nbytes), bits=tuple(1 << bit for bit in range(8)))
    yield from _truncations("OWNER", range(1, nbytes))
    yield from _wholes("OWNER")
    for text in ('{"pid": 1e999, "boot_id": "this"}', "[" * PAGE_BYTES, '{"pid": {}}', "7"):
        content = text.encode()
        yield Damage(name=f"OWNER says {text[:40]}", change=partial(write, "OWNER", content))


def of_journal(specimen: Specimen, *, step: int) -> Iterator[Damage]:
    nbytes = len(specimen.files[JOURNAL])
    for page in (0, PAGE_BYTES):
        yield from _flips(JOURNAL, range(page, page + 160), bits=(1, 16))
    yield from _flips(JOURNAL, range(2 * PAGE_BYTES, nbytes, step))
    yield from _truncations(JOURNAL, range(PAGE_BYTES, nbytes, PAGE_BYTES))
    yield from _truncations(JOURNAL, range(1, nbytes, 5 * PAGE_BYTES))
    yield from _pages(JOURNAL, nbytes)
    yield from _wholes(JOURNAL)


def of_the_rest(specimen: Specimen) -> Iterator[Damage]:
    """Sealed segments, backups, what stands in quarantine and what was being written."""
    for path, content in specimen.files.items():
        if path.startswith(("archive/", "backup/", "quarantine/", "staging/")):
            yield from _flips(path, range(0, len(content), 160))
            yield from _truncations(path, range(1, len(content), PAGE_BYTES))
            yield from _pages(path, len(content))
            yield from _wholes(path)


def of_two_files(specimen: Specimen) -> Iterator[Damage]:
    """Payloads exchanged, of one kind and of both, and payloads with other files."""
    others = [path for path in specimen.files if path.startswith(("archive/", "backup/"))]
    payloads = list(specimen.payloads)
    pairs = [*combinations(payloads, 2)]
    pairs += [(payload, other) for payload in payloads for other in others]
    pairs += [(JOURNAL, path) for path in others if path.startswith("backup/")]
    for one, other in pairs:
        yield Damage(name=f"{one} and {other} exchanged", change=partial(exchange, one, other))


def of_earlier(specimen: Specimen) -> Iterator[Damage]:
    """The journal, HEAD, or both, as they were at any earlier moment."""
    for each in specimen.earlier:
        journal = partial(write, JOURNAL, each.journal)
        head = partial(write, "HEAD", each.head)
        number = each.number
        yield Damage(name=f"the journal of moment {number}", change=journal)
        yield Damage(name=f"HEAD of moment {number}", change=head)
        yield Damage(
            name=f"journal and HEAD of moment {number}",
            change=partial(both, journal, head),
            earlier=each,
        )


def of_a_lost_journal(specimen: Specimen) -> Iterator[Damage]:
    """The journal gone, or older, or without a page, and something else damaged as well."""
    losses = [
        Damage(name="no journal", change=partial(remove, JOURNAL)),
        Damage(name="a page less", change=partial(zero, JOURNAL, 3)),
    ]
    losses += [
        Damage(
            name=f"the journal of moment {each.number}",
            change=partial(write, JOURNAL, each.journal),
            earlier=each,
        )
        for each in specimen.earlier[5::6]
    ]
    others = [
        *specimen.payloads,
        *(path for path in specimen.files if path.startswith(("backup/", "archive/", "HEAD"))),
    ]
    for loss in losses:
        for path in others:
            seconds = [
                *_flips(path, range(5, len(specimen.files[path]), PAGE_BYTES - 1)),
                *_truncations(path, (0, 20)),
                Damage(name=f"{path} removed", change=partial(remove, path)),
            ]
            for second in seconds:
                yield Damage(
                    name=f"{loss.name}, {second.name}",
                    change=partial(both, loss.change, second.change),
                    earlier=loss.earlier if path == "HEAD" else None,
                )


def while_open(specimen: Specimen) -> Iterator[Damage]:
    """Payloads that are damaged under an open store."""
    for each in of_payloads(specimen, step=50):
        yield Damage(name=f"while open, {each.name}", change=each.change, is_while_open=True)


def all_damages(specimen: Specimen) -> dict[str, Iterator[Damage]]:
    """Everything that is done to it, by its kind."""
    damages = {"of what is earlier": of_earlier(specimen)}
    match specimen.name:
        case "closed":
            damages |= {
                "of payloads": of_payloads(specimen, step=8),
                "of the rest": of_the_rest(specimen),
                "of HEAD": of_head(specimen),
                "of OWNER": of_owner(specimen),
                "of the journal": of_journal(specimen, step=80),
                "of a lost journal": of_a_lost_journal(specimen),
                "of STORE": of_store(specimen),
                "of two files": of_two_files(specimen),
                "while open": while_open(specimen),
            }
        case "died":
            # Nobody expects a damaged journal after a mere death of the process: not looked at.
            damages |= {
                "of payloads": of_payloads(specimen, step=40),
                "of the rest": of_the_rest(specimen),
                "of HEAD": of_head(specimen),
                "of OWNER": of_owner(specimen),
            }
        case _:
            damages |= {
                "of the journal": of_journal(specimen, step=160),
                "of a lost journal": of_a_lost_journal(specimen),
            }
    return damages
