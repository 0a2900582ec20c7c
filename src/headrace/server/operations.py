"""Operations for every protocol: found by name, carried out in one place, answered as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.access.caller import Caller
from headrace.broker.administration import Administration
from headrace.broker.audit import Source
from headrace.broker.engine import Engine
from headrace.budget import Share
from headrace.errors import InvalidArgument
from headrace.operations import documents
from headrace.operations.catalog import OPERATIONS
from headrace.operations.declaring import Operation

ANSWER_COPIES = 2
"""An answer is there as its items, and joined to pieces."""
PIECE_BYTES = 256 << 10
"""More than this is not joined in one turn of the loop: new memory takes longer than the copy."""


class ServedOperations:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def run(
        self,
        operation: Operation,
        given: dict[str, Any],
        caller: Caller,
        source: Source,
        *,
        strict: bool = True,
        forwarded: bool = False,
    ) -> Any:
        """Carry an operation out for a caller; returns its result."""
        administration = Administration(self._engine, caller, source, forwarded=forwarded)
        return await administration.call(operation, given, strict=strict)

    async def call(
        self,
        name: object,
        given: object,
        caller: Caller,
        source: Source,
        *,
        forwarded: bool = False,
    ) -> Any:
        """An operation by its name; returns its answer as JSON has it."""
        operation = OPERATIONS.get(name) if isinstance(name, str) else None
        if operation is None:
            raise InvalidArgument(
                f"there is no operation {name!r}; there are {', '.join(sorted(OPERATIONS))}",
                code="unknown_operation",
            )
        if not isinstance(given, dict):
            raise InvalidArgument("the arguments are a JSON object")
        result = await self.run(operation, given, caller, source, forwarded=forwarded)
        return operation.document(given, result)

    async def encoded(
        self, document: Any, encode: Callable[[Any], bytes] = documents.dumps
    ) -> list[bytes]:
        """JSON of an answer, in pieces. A list, which may have 100,000 items, is encoded in turns of the loop."""
        if not isinstance(document, list):
            return [encode(document)]
        pieces: list[bytes] = []
        items, size, held = [b"["], 0, Share(self._engine.budget)
        try:
            async for item in self._engine.pace.each(document):
                if len(items) > 1 or pieces:
                    items.append(b",")
                items.append(encode(item))
                size += len(items[-1]) + 1
                held.take(ANSWER_COPIES * len(items[-1]))
                if size >= PIECE_BYTES:
                    pieces.append(b"".join(items))
                    items, size = [], 0
            pieces.append(b"".join([*items, b"]"]))
            return pieces
        finally:
            held.clear()
