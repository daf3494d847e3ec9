"""mlx-lm with one of its names changed everywhere in it, as a release of it might do."""

import importlib.machinery
import re
from types import CodeType

_get_code = importlib.machinery.SourceFileLoader.get_code


def rename(name: str) -> None:
    """Have every module of mlx-lm that is imported from now on say another name instead."""

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        if not fullname.startswith("mlx_lm"):
            return _get_code(self, fullname)
        source = self.get_data(self.path).decode()
        renamed = re.sub(rf"(?<!\w){re.escape(name)}\b", f"{name}_anew", source)
        return self.source_to_code(renamed.encode(), self.path)

    setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)  # noqa: B010
