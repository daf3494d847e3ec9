"""Small payloads, files that keep count, and the checks that the mutants have to fail."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from walkback.journal.errors import PayloadDamagedError
from walkback.journal.files import Files, FileStatus
from walkback.journal.words import Kind
from walkback.restore.reader import Expected, read_payload
from walkback.store.payload import Description
from walkback.store.stage import StagedPayload, stage
from walkback.store.tensors import Tensor, TensorSpec

# An attention layer, one without a first slot, one with an empty tensor, and a scalar.
SPECS = (
    TensorSpec(name="0.keys", dtype="BF16", shape=(1, 2, 4, 8)),
    TensorSpec(name="0.values", dtype="BF16", shape=(1, 2, 4, 8)),
    TensorSpec(name="1.1", dtype="F32", shape=(1, 3, 5)),
    TensorSpec(name="2.0", dtype="F16", shape=(1, 0, 16)),
    TensorSpec(name="2.1", dtype="I64", shape=(3,)),
    TensorSpec(name="3.0", dtype="U8", shape=()),
)

DATA_OFFSET = 16384
FILE_BYTES = DATA_OFFSET + sum(spec.nbytes for spec in SPECS)


def described(
    specs: Sequence[TensorSpec] = SPECS,
    *,
    kind: Kind = Kind.BLOCK,
    start: int = 256,
    end: int = 512,
) -> Description:
    return Description(
        kind=kind,
        key=b"k" * 32,
        parent=b"p" * 32,
        namespace=b"n" * 32,
        layout_digest=b"l" * 32,
        plan_digest=b"q" * 32,
        start=start,
        end=end,
        generation=3,
        store_id=b"s" * 16,
        producer="mlx 0.32.4, mlx-lm 0.32.2, cpu",
        tensors=tuple(specs),
    )


def filled(specs: Sequence[TensorSpec] = SPECS) -> list[Tensor]:
    """Tensors in which every byte differs from its neighbours, and each tensor from the others."""
    return [
        Tensor(
            spec=spec,
            buffer=memoryview(bytes((7 * i + 31 * n + 1) % 256 for i in range(spec.nbytes))),
        )
        for n, spec in enumerate(specs)
    ]


def data_of(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(tensor.buffer for tensor in tensors)


def expected_of(description: Description, staged: StagedPayload) -> Expected:
    return Expected(
        header_digest=staged.header_digest,
        kind=description.kind,
        key=description.key,
        parent=description.parent,
        namespace=description.namespace,
        layout_digest=description.layout_digest,
        start=description.start,
        end=description.end,
        generation=description.generation,
        nbytes=staged.nbytes,
        tensors=description.tensors,
    )


class RecordingFiles(Files):
    """Files that remember what was done to them and which descriptors are open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.steps: list[str] = []
        self.descriptors: set[int] = set()

    def create(self, name: str) -> int:
        descriptor = super().create(name)
        self.steps.append("create")
        self.descriptors.add(descriptor)
        return descriptor

    def open(self, name: str) -> int:
        descriptor = super().open(name)
        self.descriptors.add(descriptor)
        return descriptor

    def close_file(self, descriptor: int) -> None:
        super().close_file(descriptor)
        self.descriptors.remove(descriptor)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        super().write(descriptor, buffers, offset)
        self.steps.append("write data" if offset else "write header")

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.steps.append("read")
        return super().read(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self.steps.append("sync")
        super().sync(descriptor)

    def status_of(self, descriptor: int) -> FileStatus:
        self.steps.append("status")
        return super().status_of(descriptor)

    def unlink(self, name: str) -> None:
        super().unlink(name)
        self.steps.append("unlink")


class Destination:
    """Buffers for the tensors of one read, each tensor in ``pieces`` segments."""

    def __init__(self, *, pieces: int = 1) -> None:
        self._pieces = pieces
        self.segments: dict[str, list[bytearray]] = {}

    def __call__(self, spec: TensorSpec) -> list[memoryview]:
        step = max(1, -(-spec.nbytes // self._pieces))
        sizes = [min(step, spec.nbytes - first) for first in range(0, spec.nbytes, step)]
        self.segments[spec.name] = [bytearray(size) for size in sizes]
        return [memoryview(segment) for segment in self.segments[spec.name]]

    def data(self) -> bytes:
        return b"".join(part for parts in self.segments.values() for part in parts)


def staged_example(
    files: Files, *, specs: Sequence[TensorSpec] = SPECS
) -> tuple[Expected, list[Tensor]]:
    """Stage the example as ``payload``; return what a journal would know of it, and its tensors."""
    tensors = filled(specs)
    description = described(specs)
    return expected_of(description, stage(files, "payload", description, tensors)), tensors


def is_refused(read: Callable[[], object]) -> bool:
    """Whether a read is refused as damage. Any other exception is the test's failure."""
    try:
        read()
    except PayloadDamagedError:
        return True
    return False


def sealed(text: bytes, *, padding: bytes = b" ") -> bytes:
    """A header around JSON whose own digest is right, whatever else is wrong with it."""
    end = -(-(8 + len(text)) // 16384) * 16384
    header = bytearray((end - 8).to_bytes(8, "little") + text.ljust(end - 8, padding))
    first = len(b'12345678{"__metadata__":{"header_blake3":"')
    header[first : first + 64] = b"0" * 64
    header[first : first + 64] = blake3(header).hexdigest().encode()
    return bytes(header)


# The checks. Each takes an empty directory, and the files to work with.

FilesIn = Callable[[Path], RecordingFiles]


def altered_bytes_refused(root: Path, make_files: FilesIn, offsets: Sequence[int]) -> None:
    """One bit wrong at any of the offsets: refused."""
    files = make_files(root)
    expected, _ = staged_example(files)

    def read() -> None:
        read_payload(files, "payload", expected=expected, segments_of=Destination())

    accepted: list[int] = []
    with (root / "payload").open("r+b", buffering=0) as file:
        for offset in offsets:
            good = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([good[0] ^ 1 << offset % 8]), offset)
            if not is_refused(read):
                accepted.append(offset)
            os.pwrite(file.fileno(), good, offset)
    read()
    files.close()
    assert accepted == []
    assert files.descriptors == set()


def altered_data_refused(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """One bit wrong in the data: refused."""
    altered_bytes_refused(root, make_files, range(DATA_OFFSET, FILE_BYTES))


def altered_header_refused(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """One bit wrong in the header or its padding: refused."""
    altered_bytes_refused(root, make_files, range(DATA_OFFSET))


def another_header_refused(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """A valid payload of the same size and description, but not the one committed: refused."""
    files = make_files(root)
    expected, tensors = staged_example(files)
    files.unlink("payload")
    tensors[0] = Tensor(spec=SPECS[0], buffer=memoryview(bytes(SPECS[0].nbytes)))
    stage(files, "payload", described(), tensors)
    into = Destination()
    refused = is_refused(
        lambda: read_payload(files, "payload", expected=expected, segments_of=into)
    )
    files.close()
    assert refused and into.segments == {}


def another_place_refused(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """The committed payload, but the endpoint or the layout is another one: refused."""
    files = make_files(root)
    expected, _ = staged_example(files)
    for other in (replace(expected, end=513), replace(expected, tensors=SPECS[:-1])):
        into = Destination()
        assert is_refused(
            lambda other=other, into=into: read_payload(
                files, "payload", expected=other, segments_of=into
            )
        )
        assert into.segments == {}
    files.close()


def another_size_refused_unread(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """A file of another size than the journal's: refused before a byte of it is read."""
    files = make_files(root)
    expected, _ = staged_example(files)
    whole = (root / "payload").read_bytes()
    for content in (whole[:-1], whole[:100], b"", whole + b"\0"):
        (root / "payload").write_bytes(content)
        files.steps.clear()
        assert is_refused(
            lambda: read_payload(files, "payload", expected=expected, segments_of=Destination())
        )
        assert "read" not in files.steps
    files.close()


def written_in_order(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """Data, then the header, then one sync, and only then the size that is charged."""
    files = make_files(root)
    staged_example(files)
    files.close()
    assert files.steps == ["create", "write data", "write header", "sync", "status"]
    assert files.descriptors == set()


def failed_sync_given_up(root: Path, make_files: FilesIn = RecordingFiles) -> None:
    """A sync that fails is the error, is not tried again, and its file and descriptor are gone."""
    files = make_files(root)
    error = OSError(errno.EIO, "Input/output error")
    attempts = 0

    def failing(descriptor: int) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise error

    raised: OSError | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        try:
            staged_example(files)
        except OSError as caught:
            raised = caught
    assert raised is error
    assert attempts == 1
    assert files.names() == []
    assert files.descriptors == set()
    files.close()
