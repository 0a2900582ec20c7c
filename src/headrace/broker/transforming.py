"""Changing JSON by a patch, for dead letters that are published again.

An object is a JSON Merge Patch (RFC 7396): ``{"currency": "EUR", "debug": null}`` sets one member and removes
another. A list is a JSON Patch (RFC 6902): ``[{"op": "move", "from": "/total", "path": "/amount"}]``.

A patch is bounded in time and memory: a step ``copy`` can double a document, so what all steps of a patch copy
together is counted.

Rejected: an expression language. It would have to be bounded in time and memory, and learned; a patch does
each step once.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidArgument
from headrace.operations import exact_json

STEPS_MAX = 100
COPIED_MAX = 1 << 20
"""Values, and characters of texts, that the steps of a patch may copy."""
_MEMBERS = {
    "add": {"path", "value"},
    "remove": {"path"},
    "replace": {"path", "value"},
    "move": {"path", "from"},
    "copy": {"path", "from"},
    "test": {"path", "value"},
}


def check_transform(patch: Any) -> None:
    """Raise :class:`InvalidArgument` if it can change nothing, whatever the message."""
    if isinstance(patch, dict):
        return
    if not isinstance(patch, list) or len(patch) > STEPS_MAX:
        raise _invalid(f"it is an object, or a list of at most {STEPS_MAX} steps")
    for step in patch:
        op = step.get("op") if isinstance(step, dict) else None
        if op not in _MEMBERS:
            raise _invalid(f"a step has an op: one of {', '.join(_MEMBERS)}")
        if set(step) != _MEMBERS[op] | {"op"}:
            raise _invalid(f"a step {op!r} has {', '.join(sorted(_MEMBERS[op]))}")
        for name in ("path", "from"):
            if name in step and not (isinstance(step[name], str) and step[name][:1] in ("", "/")):
                raise _invalid(f"{name} is a JSON pointer such as /items/0, not {step[name]!r:.60}")


def transformed(value: bytes, patch: Any) -> bytes:
    """The JSON text after the patch; :class:`InvalidArgument` if the patch does not fit it."""
    try:
        document = exact_json.loads(value)
    except HeadraceErrors as error:
        raise InvalidArgument(
            "the payload is not JSON, so it cannot be transformed", code="transform_failed"
        ) from error
    try:
        changed = _merged(document, patch) if isinstance(patch, dict) else _patched(document, patch)
        return exact_json.dumps(changed)
    except _Misfit as misfit:
        raise InvalidArgument(str(misfit), code="transform_failed") from None
    except RecursionError:
        raise InvalidArgument("the result is nested too deeply", code="transform_failed") from None


HeadraceErrors = (InvalidArgument, ValueError, RecursionError)


class _Misfit(Exception):
    """The patch does not fit the document."""


def _invalid(text: str) -> InvalidArgument:
    return InvalidArgument(f"the transform is not a JSON patch: {text}", code="invalid_transform")


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _patched(document: Any, steps: list[dict[str, Any]]) -> Any:
    root = {"": document}  # so that the whole document has a place, too
    left = COPIED_MAX

    def copied(value: Any) -> Any:
        nonlocal left
        left -= 1 + (len(value) if isinstance(value, str) else 0)
        if left < 0:
            raise _Misfit("the patch copies too much")
        if isinstance(value, dict):
            return {copied(name): copied(each) for name, each in value.items()}
        return [copied(each) for each in value] if isinstance(value, list) else value

    for step in steps:
        op, path = step["op"], step["path"]
        if op == "test":
            if _get(root, path) != step["value"]:
                raise _Misfit(f"{path or 'the document'} is not {step['value']!r:.60}")
        elif op == "add":
            _add(root, path, copied(step["value"]))
        elif op == "remove":
            _remove(root, path)
        elif op == "replace":
            _get(root, path)
            _remove(root, path)
            _add(root, path, copied(step["value"]))
        elif op == "move":
            if path.startswith(step["from"] + "/"):
                raise _Misfit(f"{step['from']} cannot move into itself")
            _add(root, path, _remove(root, step["from"]))
        else:
            _add(root, path, copied(_get(root, step["from"])))
    if "" not in root:
        raise _Misfit("nothing of the document is left")
    return root[""]


def _words(path: str) -> list[str]:
    return ["", *(word.replace("~1", "/").replace("~0", "~") for word in path.split("/")[1:])]


def _place(root: Any, path: str) -> tuple[Any, str]:
    """What holds the last word of a path, and that word."""
    *before, last = _words(path)
    for word in before:
        root = _at(root, word, path)
    return root, last


def _at(holder: Any, word: str, path: str) -> Any:
    if isinstance(holder, dict) and word in holder:
        return holder[word]
    if isinstance(holder, list):
        return holder[_index(holder, word, path, 1)]
    raise _Misfit(f"there is no {path}")


def _index(holder: list[Any], word: str, path: str, beyond: int) -> int:
    is_number = word.isascii() and word.isdigit() and len(word) < 10
    if not is_number or int(word) > len(holder) - beyond:
        raise _Misfit(f"there is no {path}")
    return int(word)


def _get(root: Any, path: str) -> Any:
    holder, last = _place(root, path)
    return _at(holder, last, path)


def _add(root: Any, path: str, value: Any) -> None:
    holder, last = _place(root, path)
    if isinstance(holder, dict):
        holder[last] = value
    elif isinstance(holder, list):
        at = len(holder) if last == "-" else _index(holder, last, path, 0)
        holder.insert(at, value)
    else:
        raise _Misfit(f"there is no {path}")


def _remove(root: Any, path: str) -> Any:
    holder, last = _place(root, path)
    _at(holder, last, path)
    return holder.pop(last if isinstance(holder, dict) else int(last))
