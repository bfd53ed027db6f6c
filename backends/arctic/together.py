"""Arctic backend: several coroutines at once, and the first failure of them (imports
asyncio only)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs all to their end. Where one fails the others are cancelled and waited for, and its
    error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in coroutines:
                tasks.create_task(each)
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
