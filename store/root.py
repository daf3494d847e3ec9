"""The root of a cache: its directory, its lock, who it is, and who holds it.

=============  ==================================================================================
name           what
=============  ==================================================================================
``STORE``      CBOR: format, store id, the secret that keys the block keys, a check. Written once
``OWNER``      JSON, for people too: pid and boot id of the last process that opened the cache
``HEAD``       two slots: the newest commit, from outside the journal
``journal/``   the LMDB environment; ``backup/`` its copies, ``archive/`` its sealed segments
``blocks/``    payloads, ``<epoch>/<counter>``; so are ``sidecars/``
``staging/``   payloads being written, ``<epoch>-<counter>``
``quarantine/``  payloads that did not verify
=============  ==================================================================================
"""

import contextlib
import errno
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cbor2
from blake3 import blake3

from ..journal.environment import FOLDER
from ..journal.errors import CacheLockedError, FormatError, RootRefusedError
from ..journal.files import Files
from ..journal.head import Head
from ..journal.meta_page import may_be_truncated

FORMAT = 1
FOLDERS = ("archive", "backup", "blocks", "quarantine", "sidecars", "staging")

_STORE = "STORE"
_OWNER = "OWNER"
# What may stand in a root that is not a cache yet: what a crash inside the making of one leaves.
_BEGINNINGS = {_OWNER, f"{_OWNER}.new", f"{_STORE}.new", ".DS_Store"}
_READ_BYTES_MAX = 4096

# What the system says of a directory that it does not let us change.
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """Who a cache is. The secret makes its keys useless for confirming a guessed prompt."""

    store_id: bytes
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that opened the cache last."""

    pid: int
    boot_id: str


def lock_root(
    path: Path, *, is_new_allowed: bool, make_files: Callable[[Path], Files] = Files
) -> Files:
    """Open the directory, making it if it is not there and may be made, and take its lock.

    Raises:
        RootRefusedError: the parent is missing, or the path is no directory or cannot be written.
        CacheLockedError: another process holds it; the error names the holder.
    """
    root = Path(os.path.realpath(path))
    if not root.parent.is_dir():
        raise RootRefusedError(
            f"{root.parent} does not exist, so {root.name} is not made in it: a missing parent is "
            "usually a volume that is not mounted. Mount it, or make the parent directory yourself."
        )
    try:
        if is_new_allowed:
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
        files = make_files(root)
    except FileNotFoundError:
        raise RootRefusedError(f"there is no cache at {root}") from None
    except NotADirectoryError:
        raise RootRefusedError(f"{root} is a file; a cache needs a directory") from None
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise RootRefusedError(f"{root} cannot be used: {error.strerror}") from error
    try:
        if not files.try_lock():
            owner = read_owner(files)
            # Whoever only looks holds the lock too, and does not write itself down.
            pid = owner.pid if owner is not None and _is_alive(owner.pid) else None
            raise CacheLockedError(root, pid, is_this_process=pid == os.getpid())
    except BaseException:
        files.close()
        raise
    return files


def sync_root(root: Path) -> None:
    """Make a root's name durable in its parent. One that cannot be opened is not synced.

    Not where it is made: whoever died in between would leave it to an opening that finds it there.
    """
    with contextlib.suppress(PermissionError), contextlib.closing(Files(root.parent)) as files:
        files.sync_directory("")


def load_identity(files: Files) -> StoreIdentity | None:
    """Who the cache in this root is; None if it is not one yet.

    Raises RootRefusedError if the root holds anything else, or a cache that lost its STORE.
    """
    content = _read(files, _STORE)
    if content is None:
        others = sorted(set(files.names()) - _BEGINNINGS)
        if "journal" in others:
            raise RootRefusedError(
                f"{files.root} holds a journal but no STORE. Its keys cannot be made again: put "
                "STORE back from a copy, or start with an empty directory."
            )
        if others:
            raise RootRefusedError(
                f"{files.root} is not a cache and not empty: it holds {others[0]}. "
                "Name a directory of its own for the cache."
            )
        return None
    try:
        version, store_id, secret, check = cbor2.loads(content)
        is_whole = check == _check_of(version, store_id, secret)
    except (cbor2.CBORDecodeError, TypeError, ValueError) as error:
        raise RootRefusedError(
            f"{files.root / _STORE} does not decode ({error}): put it back from a copy"
        ) from error
    if not is_whole:
        # With another id or secret every payload would look like another cache's, and be swept.
        raise RootRefusedError(
            f"{files.root / _STORE} is damaged, and nothing is touched without it: put it back "
            "from a copy, or start with an empty directory"
        )
    if version != FORMAT:
        raise FormatError(
            f"{files.root} has format {version}; this walkback knows {FORMAT}. "
            "Upgrade walkback, or use another directory."
        )
    return StoreIdentity(store_id=store_id, secret=secret)


def make_identity(
    files: Files, randomness: Callable[[int], bytes] = secrets.token_bytes
) -> StoreIdentity:
    """Durably make a new cache's STORE. It stands before the journal does."""
    identity = StoreIdentity(store_id=randomness(16), secret=randomness(32))
    fields = (FORMAT, identity.store_id, identity.secret)
    content = cbor2.dumps([*fields, _check_of(*fields)])
    _replace(files, _STORE, content, is_durable=True)
    return identity


def _check_of(version: int, store_id: bytes, secret: bytes) -> bytes:
    return blake3(cbor2.dumps([version, store_id, secret])).digest()


def make_folders(files: Files) -> None:
    """Make the folders that are missing. ``NotADirectoryError`` if something else stands there."""
    missing: list[str] = []
    for name in FOLDERS:
        status = files.status(name)
        if status is None:
            missing.append(name)
        elif not status.is_directory:
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(files.root / name)
            )
    for name in missing:
        files.make_directory(name)
    if missing:
        files.sync_directory("")


def read_owner(files: Files) -> Owner | None:
    """Who opened the cache last, if that can be told."""
    try:
        content = json.loads(_read(files, _OWNER) or b"null")
        return Owner(pid=int(content["pid"]), boot_id=str(content["boot_id"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def write_owner(files: Files, owner: Owner) -> None:
    """Say who holds the cache. Not durable: after a power loss nobody does."""
    content = json.dumps({"pid": owner.pid, "boot_id": owner.boot_id}).encode()
    _replace(files, _OWNER, content, is_durable=False)


def this_process() -> Owner:
    """This process, as an owner."""
    return Owner(pid=os.getpid(), boot_id=_boot_id())


def needs_verification(
    files: Files, head: Head | None, *, previous: Owner | None, owner: Owner
) -> bool:
    """Whether LMDB's file may be other than what was committed, so that a child must look first.

    After a clean close, or a mere death of the process, it is not.
    """
    clean = head.clean if head is not None else None
    if clean is not None:
        # The first write of an opening takes the mark away: a file that differs from it was
        # changed by somebody else.
        return not clean.matches(files.status(f"{FOLDER}/data.mdb"))
    is_of_this_boot = previous is not None and owner.boot_id == previous.boot_id != ""
    return not is_of_this_boot or may_be_truncated(files)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def _boot_id() -> str:
    """What the kernel calls this boot; "" if it does not say, which equals no boot."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read(files: Files, name: str) -> bytes | None:
    try:
        descriptor = files.open(name)
    except FileNotFoundError:
        return None
    try:
        buffer = bytearray(_READ_BYTES_MAX)
        count = files.read(descriptor, [memoryview(buffer)], 0)
    finally:
        files.close_file(descriptor)
    return bytes(buffer[:count])


def _replace(files: Files, name: str, content: bytes, *, is_durable: bool) -> None:
    new = f"{name}.new"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(new)
    descriptor = files.create(new)
    try:
        files.write(descriptor, [content], 0)
        if is_durable:
            files.sync(descriptor)
    finally:
        files.close_file(descriptor)
    files.rename(new, name)
    if is_durable:
        files.sync_directory("")
