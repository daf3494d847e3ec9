"""mlx-lm's model provider, which binds what it loads."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false

from typing import Any

from mlx_lm.server import ModelProvider

from .quiet import quietly
from .session import MutableSession


class BindingModelProvider(ModelProvider):
    """Binds each model that it loads, on the generation thread."""

    def __init__(self, session: MutableSession, cli_args: Any) -> None:
        self._session = session
        session.tell_of_settings()
        super().__init__(cli_args)

    def reset(self) -> None:
        with quietly("the model before was not unbound"):
            self._session.unbind()
        super().reset()

    def _load(self, *key: Any, **options: Any) -> None:
        super()._load(*key, **options)
        with quietly("the model is served uncached"):
            self._session.bind(self)
