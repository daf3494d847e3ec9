"""The command line: ``walkback check``, ``log``, ``stats``, ``demo`` and ``serve``."""

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from .check import check
from .log import log
from .output import COULD_NOT_LOOK, print_error
from .stats import stats

app = typer.Typer(
    name="walkback",
    help="Serve models over a durable prefix cache, and look into one. check, log and stats change "
    "nothing on its disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Joins the lines of a docstring's paragraph; the other modes break where the source does.
    rich_markup_mode="markdown",
)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"walkback {version('walkback')}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    pass


app.command(name="check")(check)
app.command(name="log")(log)
app.command(name="stats")(stats)


# It needs mlx, which takes a second to import and is not there on every machine that has a cache:
# so the command is only this, and takes even its --help from the module, when it is called.
@app.command(
    name="demo",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _demo(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    """Watch a model store, crash, restore and walk back. Needs mlx."""
    try:
        demo: Callable[..., object] = importlib.import_module(".demo", __package__).demo
    except ImportError as error:
        print_error(f"the demo cannot run here: {error}")
        raise typer.Exit(COULD_NOT_LOOK) from None
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(demo)
    inner(args=context.args, prog_name=context.command_path)


@app.command(
    name="serve",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _serve(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    """Serve a model as mlx_lm.server does, over a cache. Needs mlx."""
    try:
        serve: Callable[[typer.Context], None] = importlib.import_module(
            ".serve", __package__
        ).serve
    except ImportError as error:
        print_error(f"the server cannot run here: {error}")
        raise typer.Exit(COULD_NOT_LOOK) from None
    serve(context)


def main() -> None:
    """The console script."""
    app(prog_name="walkback")
