"""The architecture, as tests: who imports whom, what stays pure, and one identity per module.

This file is the diagram. A folder may import what LAYERS says, and itself.
"""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import walkback

ROOT = Path(__file__).parent.parent

LAYERS: dict[str, set[str]] = {
    "journal": set(),
    "store": {"journal"},
    "restore": {"journal", "store"},
    "integration": {"journal", "store", "restore"},
    "tools": {"journal", "store", "restore"},
}

# The commands that run a model. The other tools work where no mlx is installed.
RUNS_A_MODEL = {
    "tools/demo.py",
    "tools/demo_cases.py",
    "tools/demo_processes.py",
    "tools/demo_run.py",
    "tools/demo_worker.py",
    "tools/oracle.py",
    "tools/serve.py",
}
MLX = {"mlx", "mlx_lm"}

# Modules that decide and never act: no disk, no clock, no thread, no randomness, no mlx.
PURE = {
    "journal": (
        "chain",
        "codec",
        "entries",
        "errors",
        "events",
        "invariants",
        "state",
        "tables",
        "words",
    ),
    "store": ("boundary", "decoder", "eviction", "histogram", "overlay", "payload", "tensors"),
    "restore": ("candidates", "identity", "images", "layout", "plan"),
}
PURE_PATHS = [f"{folder}/{name}.py" for folder, names in PURE.items() for name in names]
ACTING = {
    "asyncio",
    "concurrent",
    "fcntl",
    "io",
    "lmdb",
    "logging",
    "mlx",
    "mlx_lm",
    "multiprocessing",
    "numpy",
    "os",
    "pathlib",
    "random",
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "tenacity",
    "threading",
    "time",
}
PURE_ALL_THE_SAME = {
    # An error names a path.
    ("journal/errors.py", "pathlib"),
    # A claim carries the event that its outcome sets; nobody waits in here.
    ("store/boundary.py", "threading"),
}
# Pure modules that take the type of a value from a module that acts.
TYPES_ONLY = {
    ("store/boundary.py", "store/stage.py"),
    ("restore/candidates.py", "store/lookup.py"),
}

# Where a broad except may end: the edge to a caller whose request must go on, the two threads whose
# death nobody would see, and the edge of the process.
MAY_CATCH_ANYTHING = {
    "integration/restoration.py",
    "integration/recording.py",
    "integration/serving/pages.py",
    "integration/serving/quiet.py",
    "integration/serving/requests.py",
    "integration/serving/session.py",
    "store/committer.py",
    "store/deletion.py",
    "store/ordering.py",
    "store/writer.py",
    "tools/output.py",
}

LINES_MAX = 400


def sources() -> list[Path]:
    return [path for folder in LAYERS for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file as (level, dotted name), with each name that it takes.

    Level 1 is ``from .x``, inside a root folder; level 2 is ``from ..x``, another one. A folder in
    a folder counts from there: its own modules are ``serving.x``.
    """
    inner = path.parent.relative_to(ROOT).parts[1:]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                if not node.level or node.level > len(inner) + 1:
                    yield max(node.level - len(inner), 0), name
                else:
                    yield 1, ".".join([*inner[: len(inner) + 1 - node.level], name])


def absolute(path: Path) -> set[str]:
    return {name.split(".")[0] for level, name in imports(path) if level == 0}


def inside(path: Path) -> set[str]:
    """The files of the package that a file imports."""
    found: set[str] = set()
    for level, name in imports(path):
        root = [path.relative_to(ROOT).parts[0]] if level == 1 else []
        parts = [*root, *name.split(".")]
        for length in range(2, len(parts) + 1 if level else 0):
            file = f"{'/'.join(parts[:length])}.py"
            if (ROOT / file).exists():
                found.add(file)
    return found


SOURCES = [name_of(path) for path in sources()]


def test_the_walk_sees_the_imports_that_it_is_to_judge() -> None:
    """Without it a walk that found nothing would pass for a clean one."""
    assert len(SOURCES) > 50
    assert "lmdb" in absolute(ROOT / "journal/environment.py")
    assert "mlx" in absolute(ROOT / "restore/materialise.py")
    assert {"journal/events.py", "store/store.py"} <= inside(ROOT / "restore/walkback.py")
    assert "integration/cache.py" in inside(ROOT / "tools/demo_cases.py")
    assert {
        "integration/binding.py",
        "integration/serving/turns.py",
        "store/boundary.py",
    } <= inside(ROOT / "integration/serving/session.py")


@pytest.mark.parametrize("source", SOURCES)
def test_imports_go_down_the_layers_only(source: str) -> None:
    folder = source.split("/")[0]
    allowed = LAYERS[folder] | {folder}
    if source in RUNS_A_MODEL:
        allowed = allowed | {"integration"}

    for level, name in imports(ROOT / source):
        top = name.split(".")[0]
        if level == 2:
            assert top in allowed, f"{source} may not import {name}"
        assert level <= 2, f"{source} leaves the package with {name}"


@pytest.mark.parametrize("source", SOURCES)
def test_the_package_imports_itself_relatively(source: str) -> None:
    bare = absolute(ROOT / source) & {*LAYERS, "walkback"}

    assert not bare, f"import {bare} relatively"


@pytest.mark.parametrize("source", SOURCES)
def test_only_what_runs_a_model_imports_mlx(source: str) -> None:
    may = source.startswith("integration/") or source in RUNS_A_MODEL | {"restore/materialise.py"}

    assert may or not absolute(ROOT / source) & MLX


@pytest.mark.parametrize("source", [each for each in SOURCES if not each.startswith("journal/")])
def test_only_the_journal_imports_lmdb(source: str) -> None:
    assert "lmdb" not in absolute(ROOT / source)


@pytest.mark.parametrize("source", PURE_PATHS)
def test_what_decides_imports_nothing_that_acts(source: str) -> None:
    acting = absolute(ROOT / source) & ACTING

    assert {(source, name) for name in acting} <= PURE_ALL_THE_SAME


@pytest.mark.parametrize("source", PURE_PATHS)
def test_what_decides_imports_only_what_decides(source: str) -> None:
    acting = inside(ROOT / source) - set(PURE_PATHS)

    assert {(source, name) for name in acting} <= TYPES_ONLY


def test_every_exception_to_purity_is_still_needed() -> None:
    assert all(module in absolute(ROOT / source) for source, module in PURE_ALL_THE_SAME)
    assert all(other in inside(ROOT / source) for source, other in TYPES_ONLY)


def broad_handlers(path: Path) -> Iterator[ast.ExceptHandler]:
    """The handlers that catch everything and do not end by raising something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            is_broad = caught in {"Exception", "BaseException"}
            if is_broad and not isinstance(node.body[-1], ast.Raise):
                yield node


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_but_an_edge_catches_everything(source: str) -> None:
    lines = [handler.lineno for handler in broad_handlers(ROOT / source)]

    assert source in MAY_CATCH_ANYTHING or not lines, f"{source}, lines {lines}"


def test_every_edge_that_may_catch_everything_does() -> None:
    assert all(list(broad_handlers(ROOT / source)) for source in MAY_CATCH_ANYTHING)


@pytest.mark.parametrize("source", SOURCES)
def test_no_module_has_outgrown_its_noun(source: str) -> None:
    lines = len((ROOT / source).read_text().splitlines())

    assert lines <= LINES_MAX, f"{source} has {lines} lines: split it"


def test_every_root_folder_is_linked_into_the_package() -> None:
    package = ROOT / "src" / "walkback"
    links = {path.name: path for path in package.iterdir() if path.is_symlink()}

    assert links.keys() == LAYERS.keys()
    for name, link in links.items():
        assert link.readlink() == Path("..") / ".." / name
        assert link.resolve() == ROOT / name


@pytest.mark.parametrize("source", [each for each in SOURCES if not each.endswith("__main__.py")])
def test_no_module_is_loaded_under_two_names(source: str) -> None:
    dotted = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    module = importlib.import_module(f"walkback.{dotted}")

    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / source
    assert dotted not in sys.modules
    same = [
        name
        for name, other in list(sys.modules.items())
        if getattr(other, "__file__", None) == module.__file__
    ]
    assert same == [f"walkback.{dotted}"]


def test_the_package_is_the_one_of_this_checkout() -> None:
    assert walkback.__file__ is not None
    assert Path(walkback.__file__).resolve() == ROOT / "src" / "walkback" / "__init__.py"


def started(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["check", "log", "stats"])
def test_the_tools_that_look_start_without_mlx(command: str) -> None:
    """Not installed at all: an import of it raises."""
    code = (
        "import sys\n"
        "sys.modules.update({'mlx': None, 'mlx.core': None, 'mlx_lm': None})\n"
        f"sys.argv = ['walkback', '{command}', '--help']\n"
        "from walkback.tools.main import main\n"
        "main()\n"
    )

    assert f"walkback {command}" in started(code)


def test_the_store_and_the_restore_loop_work_without_mlx() -> None:
    code = (
        "import sys\n"
        "sys.modules.update({'mlx': None, 'mlx.core': None, 'mlx_lm': None})\n"
        "import walkback.store.store, walkback.restore.walkback\n"
        "print(sorted(name for name in sys.modules if name.startswith('walkback.integration')))\n"
    )

    assert started(code) == "[]\n"
