"""Server: the HTTP status of each error (imports errors only)."""

from __future__ import annotations

from .. import errors

#: the first class that fits decides; the frame in the body says everything, the status only helps
#: proxies, logs and people with curl
_STATUSES: tuple[tuple[type[errors.RemoteRLError], int], ...] = (
    (errors.InvalidRequestError, 400),
    (errors.ProtocolError, 400),
    (errors.AuthenticationError, 401),
    (errors.LeaseError, 403),
    (errors.ConflictError, 409),
    (errors.DirtyGradientsError, 409),
    (errors.OperationCancelled, 409),
    (errors.RunLostError, 410),
    (errors.UnsupportedError, 501),
    (errors.RemoteRLError, 500),
)


def status_of(error: errors.RemoteRLError) -> int:
    """The status that goes with `error`."""
    return next(status for error_class, status in _STATUSES if isinstance(error, error_class))
