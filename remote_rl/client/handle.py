"""Client: what another process needs to join a run (imports errors and fields)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from ..errors import InvalidRequestError
from ..types.fields import integer, strict, text


@strict
@attrs.frozen(kw_only=True)
class Handle:
    """Names a run and its driver's epoch; holds no secret (the token comes from REMOTE_RL_TOKEN
    or an argument of `connect`).

    url: of the server. instance_id: of the run. epoch: of the driver who gave the handle.
    """

    url: str = attrs.field(validator=text())
    instance_id: str = attrs.field(validator=text())
    epoch: int = attrs.field(validator=integer(minimum=1))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return attrs.asdict(self)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Writes it to a file that `connect` takes."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def of(cls, data: Any) -> Handle:
        """From a Handle, a mapping, JSON text, or the path of a saved one."""
        if isinstance(data, Handle):
            return data
        if isinstance(data, Path) or (isinstance(data, str) and not data.lstrip().startswith("{")):
            path = Path(data)
            if not path.is_file():
                raise InvalidRequestError(f"there is no saved handle at {str(path)!r}")
            try:
                data = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(f"{path} is no saved handle: {error}") from error
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except ValueError as error:
                raise InvalidRequestError(f"the handle is not JSON: {error}") from error
        try:
            return cls(**dict(data))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"that is no handle of a run: {error}") from error
