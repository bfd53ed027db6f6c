"""Command line: how records of the log become lines on stderr (imports nothing of remote_rl)."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: what every record has; anything else was given as `extra=`
_ALWAYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO, UTC), level, logger, message, the fields given as
    `extra=`, and `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _ALWAYS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def configure(level: str, form: str) -> None:
    """Sends everything from `level` up to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":  # one line a request says nothing that the dispatcher's log doesn't
        logging.getLogger("remote_rl.server.access").setLevel(logging.WARNING)
