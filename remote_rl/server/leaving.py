"""Server: the end of the process, which nothing that hangs in an engine can hold up (imports
nothing of remote_rl)."""

from __future__ import annotations

import logging
import os
import threading
import time

log = logging.getLogger("remote_rl.server")

#: for what is left once the run has been closed: threads of libraries, tasks that heed nothing
SECONDS = 5.0


def leave_within(seconds: float, code: int) -> None:
    """Ends the process with `code` after so many seconds, if it has not ended by then.

    asyncio waits at its end for every task and thread of its own, and the interpreter for every
    thread that is no daemon; a call of an engine that never returns would keep both for ever.
    """

    def leave() -> None:
        time.sleep(seconds)
        log.error("something of the backend does not end; the process is ended without it")
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=leave, name="remote_rl end", daemon=True).start()
