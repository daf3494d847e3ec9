"""``walkback serve``: mlx-lm's server over a cache."""

import logging
import os
import sys

import typer

from ..integration.serving.server import serve as run_server
from .output import CLEAN, run


def serve(context: typer.Context) -> None:
    """Serve a model as mlx_lm.server does, resuming prompts from RAM and SSD, also after a restart.

    All flags of mlx_lm.server are taken.
    """
    try:
        run(lambda: _serve(context.args))
    except typer.Exit as end:
        # Everything is durable and closed. What failed may have left mlx-lm's thread running, which
        # the interpreter would wait for; and mlx 0.32 aborts at exit if a thread besides the main
        # one has computed: so it ended 9 of 12 times that the server was stopped.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(end.exit_code)


def _serve(arguments: list[str]) -> int:
    run_server(arguments)
    return CLEAN
