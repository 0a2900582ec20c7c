"""Small shell scripts that stand between Spark and a program it starts, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def kept(name: str, text: str) -> Path:
    """An executable script with this text, in a folder of its own whose name begins with the first
    word of ``name``; the rest of ``name`` is its path in there. Made once, whole or not at all."""
    kind, _, rest = name.partition("/")
    folder = _cache() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    script = folder / rest
    with suppress(OSError):
        if script.read_text(encoding="utf-8") == text and os.access(script, os.X_OK):
            return script
    script.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be about to run it: the script appears whole, or not yet.
    handle, half = tempfile.mkstemp(dir=script.parent)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(half, 0o755)
    os.replace(half, script)
    return script


def _cache() -> Path:
    """Where there is no home to keep things in, a folder for this process."""
    with suppress(OSError, RuntimeError):
        given = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(given) if given else Path.home() / ".cache") / "headrace"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="headrace-"))
