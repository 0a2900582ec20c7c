"""Operations for every protocol: found by name, carried out in one place, answered as JSON."""

from __future__ import annotations

from typing import Any

from headrace.broker.administration import Administration
from headrace.broker.aio import AsyncBroker
from headrace.broker.engine import Engine
from headrace.errors import InvalidArgument
from headrace.operations.catalog import OPERATIONS
from headrace.operations.declaring import Operation


class ServedOperations:
    def __init__(self, engine: Engine):
        self._administration = Administration(engine)
        self.broker = AsyncBroker.around(engine)
        """The same operations as methods, for the server's own use."""

    async def run(self, operation: Operation, given: dict[str, Any], *, strict: bool = True) -> Any:
        """Carry an operation out; returns its result."""
        return await self._administration.call(operation, given, strict=strict)

    async def call(self, name: object, given: object) -> Any:
        """An operation by its name; returns its answer as JSON has it."""
        operation = OPERATIONS.get(name) if isinstance(name, str) else None
        if operation is None:
            raise InvalidArgument(
                f"there is no operation {name!r}; there are {', '.join(sorted(OPERATIONS))}",
                code="unknown_operation",
            )
        if not isinstance(given, dict):
            raise InvalidArgument("the arguments are a JSON object")
        return operation.document(given, await self.run(operation, given))
