"""The disks that a power loss may leave of a ``PageDisk``.

- Of a page any one of the versions that it has had since it was last synced, or two adjacent ones
  torn at 512 bytes.
- Of a size any one that it has had since, with or without the data: what is missing is zeros.
- Of the directory entries that were not synced any subset. A rename within a directory is one
  entry, one across directories is two.
- A write through a descriptor with O_DSYNC made its own bytes durable and nothing else.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from .disk import SECTOR_BYTES
from .pages import (
    PAGE_BYTES,
    ZEROS,
    Content,
    EntryChange,
    Page,
    PagedImage,
    PageDisk,
    PageVersion,
    SizeVersion,
    image_of,
    put_names,
)

# With no more combinations of what may be lost than this, all are built; else some.
_COMBINATIONS_MAX = 1 << 9
# Of a page that was written many times since it was synced, such as a slot of HEAD, these many of
# the newest versions are told apart, with the oldest.
_NEWEST_VERSIONS = 2
# Of so many changes at one moment, such as the pages of a large payload, some are lost alone.
_ALONE_MAX = 24

Version = EntryChange | PageVersion | SizeVersion
AnyVersion = TypeVar("AnyVersion", EntryChange, PageVersion, SizeVersion)


class _Choice(NamedTuple):
    """What may be lost on its own: the versions that may be there instead, the newest last.

    ``is_clean`` if the system takes the newest one for durable, after a sync that failed. They
    belong to ``page`` of ``file``, to the size of ``file`` if there is no page, or say themselves
    to which directory.
    """

    versions: Sequence[Version]
    is_clean: bool = False
    file: int = -1
    page: int = -1

    def __str__(self) -> str:
        match self.versions[-1]:
            case EntryChange(_, entries):
                names = (f"{'+' if number else '-'}{name}" for name, number in entries.names)
                return f"entry {', '.join(names)}"
            case SizeVersion():
                return f"size of #{self.file}"
            case PageVersion():
                return f"page {self.page} of #{self.file}"


def lost_power(
    disk: PageDisk, randomness: random.Random, *, random_count: int
) -> Iterator[PagedImage]:
    """First what matters after a failed sync. Then every combination of what may be lost, if they
    are not too many. Else none of it, all, some alone, all but those, what was done before each
    step, and some random ones. At last, with all else there, pages that were torn."""
    choices = _choices_of(disk)
    counts = [len(choice.versions) for choice in choices]
    yield _kept(disk, "none", choices, [0] * len(choices))
    if any(choice.is_clean for choice in choices):
        dirty = [0 if choice.is_clean else len(choice.versions) for choice in choices]
        yield _kept(disk, "all but what is taken for clean", choices, dirty)
    if math.prod(1 + count for count in counts) <= _COMBINATIONS_MAX:
        for some in itertools.product(*(range(1 + count) for count in counts)):
            yield _kept(disk, "some", choices, some)
    else:
        yield from _some(disk, choices, counts, randomness, random_count)
    yield from _torn(disk, choices, counts, randomness)


def _some(
    disk: PageDisk,
    choices: Sequence[_Choice],
    counts: Sequence[int],
    randomness: random.Random,
    random_count: int,
) -> Iterator[PagedImage]:
    yield _kept(disk, "all", choices, counts)
    alone = randomness.sample(range(len(choices)), min(_ALONE_MAX, len(choices)))
    for index in sorted(alone):
        only = [count if each == index else 0 for each, count in enumerate(counts)]
        without = [0 if each == index else count for each, count in enumerate(counts)]
        yield _kept(disk, f"only {choices[index]}", choices, only)
        yield _kept(disk, f"all but {choices[index]}", choices, without)
    for step in sorted({version.step for choice in choices for version in choice.versions}):
        early = [sum(each.step <= step for each in choice.versions) for choice in choices]
        yield _kept(disk, f"up to step {step}", choices, early)
    for _ in range(random_count):
        odds = randomness.choice((0.2, 0.5, 0.8))
        some = [
            randomness.randint(1, count) if randomness.random() < odds else 0 for count in counts
        ]
        yield _kept(disk, "random", choices, some)


def _torn(
    disk: PageDisk,
    choices: Sequence[_Choice],
    counts: Sequence[int],
    randomness: random.Random,
) -> Iterator[PagedImage]:
    pages = [index for index, choice in enumerate(choices) if choice.page >= 0]
    for index in sorted(randomness.sample(pages, min(_ALONE_MAX, len(pages)))):
        choice = choices[index]
        durable = disk.files[choice.file].pages.get(choice.page, ZEROS)
        versions = [each.page for each in choice.versions if isinstance(each, PageVersion)]
        older, newer = randomness.choice(list(itertools.pairwise([durable, *versions])))
        cut = randomness.randrange(SECTOR_BYTES, PAGE_BYTES, SECTOR_BYTES)
        for first, second in ((older, newer), (newer, older)):
            page = Page(first.content[:cut] + second.content[cut:])
            torn = choice._replace(versions=[PageVersion(0, page)])
            those = [*choices[:index], torn, *choices[index + 1 :]]
            kept = [*counts[:index], 1, *counts[index + 1 :]]
            yield _kept(disk, f"torn {choice}", those, kept)


def _choices_of(disk: PageDisk) -> list[_Choice]:
    choices = [_Choice([change]) for change in disk.pending]
    for number in _reachable(disk):
        file = disk.files[number]
        for page, versions in file.versions.items():
            is_clean = page in file.clean
            choices.append(_Choice(_told_apart(versions), is_clean, number, page))
        if file.sizes:
            choices.append(_Choice(_told_apart(file.sizes), file=number))
    return choices


def _reachable(disk: PageDisk) -> list[int]:
    """Files that have a name on the disk, or may have."""
    named = {number for names in disk.folders.values() for number in names.values()}
    named |= {number for change in disk.pending for _, number in change.entries.names if number}
    return sorted(named & disk.files.keys())


def _told_apart(versions: Sequence[AnyVersion]) -> Sequence[AnyVersion]:
    return [*versions[:1], *versions[1:][-_NEWEST_VERSIONS:]]


def _kept(
    disk: PageDisk, label: str, choices: Sequence[_Choice], kept: Sequence[int]
) -> PagedImage:
    """The image with the version of this number of each choice; 0 is what is durable."""
    folders = {number: dict(names) for number, names in disk.folders.items()}
    sizes: dict[int, int] = {}
    pages: dict[int, dict[int, Page]] = {}
    for choice, number in zip(choices, kept, strict=True):
        if not number:
            continue
        match choice.versions[number - 1]:
            case EntryChange(_, entries):
                put_names(folders[entries.folder], entries.names)
            case SizeVersion(_, nbytes):
                sizes[choice.file] = nbytes
            case PageVersion(_, page):
                pages.setdefault(choice.file, {})[choice.page] = page
    contents = {number: file.durable for number, file in disk.files.items()}
    for number in sizes.keys() | pages.keys():
        file = disk.files[number]
        merged = {**file.pages, **pages.get(number, {})}
        contents[number] = Content.of(merged, sizes.get(number, file.nbytes))
    return image_of(label, folders, contents)
