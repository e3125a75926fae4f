"""Libraries that only some options need."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.spec.errors import SettingError


def library(name: str, purpose: str) -> Any:
    """The imported library.

    Args:
        name: As imported.
        purpose: What it is for, as in "BLEU is computed".

    Raises:
        SettingError: It is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingError(
            f"{purpose} with the library `{name}`",
            found=f"it cannot be imported: {error}",
            remedy="pip install 'paceline[recipes]'",
        ) from None
