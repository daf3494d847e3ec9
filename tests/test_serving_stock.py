"""mlx-lm's own server, started without us, is what it is without us installed."""

import os
import subprocess
import sys
from importlib.metadata import distribution

CODE = (
    "import sys\n"
    "import mlx_lm.server\n"
    "sys.argv = ['mlx_lm.server', '--help']\n"
    "try:\n"
    "    mlx_lm.server.main()\n"
    "except SystemExit:\n"
    "    pass\n"
    "seams = ('LRUPromptCache', 'BatchGenerator', 'ModelProvider', 'ResponseGenerator')\n"
    "print([getattr(mlx_lm.server, name).__module__ for name in seams], file=sys.stderr)\n"
    "print([name for name in sys.modules if name.startswith('walkback')], file=sys.stderr)\n"
)


def test_nothing_of_ours_is_imported_by_the_server_of_mlx_lm() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )

    *_, seams, ours = done.stderr.splitlines()
    assert "walkback" not in seams and "mlx_lm.server" in seams
    assert ours == "[]"
    assert "--ssd-max" not in done.stdout and "--prompt-cache-size" in done.stdout


def test_what_is_installed_hooks_into_nothing() -> None:
    """A command, and no plug-in of anybody; a line of a .pth that runs code would be a hook too."""
    installed = distribution("walkback")
    groups = {entry.group for entry in installed.entry_points}

    assert groups == {"console_scripts"}
    for file in installed.files or ():
        if file.suffix == ".pth":
            lines = installed.locate_file(file).read_text().splitlines()
            assert not [line for line in lines if line.startswith(("import ", "import\t"))]
