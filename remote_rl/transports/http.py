"""Transport: messages to a dispatcher behind HTTP (imports wire, messages, errors; aiohttp inside).

One POST a message. What can't be told from a lost message is `ConnectionLost`, and the client sends
it again; what another try can't mend is an error of `remote_rl.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import attrs

from ..errors import AuthenticationError, InvalidRequestError, ProtocolError, RemoteRLError
from ..messages import ConnectionLost, Message, PendingDigest
from ..requests import Request
from ..wire import Frame, decode, encode, seal
from .bodies import CHUNK_BYTES, FRAME_TYPE, SMALL_BYTES, arrived, pieces, receive, route_of
from .silence import Silences

if TYPE_CHECKING:
    import aiohttp

CONNECTIONS = 8
#: the rest of the connections carry a wait and a sign of life
SUBMITS = CONNECTIONS - 2
CONNECT_SECONDS = 5.0
#: a frame of at least this size first asks whether it may come (Expect: 100-continue), unless one
#: of its size was let in before
ASK_FIRST_BYTES = 1 << 20
#: foreign answers below 500 that say "not now"; from 500 on: "I don't know what became of it"
NOT_NOW_STATUSES = frozenset({408, 425, 429})


@attrs.frozen
class Cut:
    """For tests: the connection breaks in mid-body. direction: "up" in the request, "down" in the
    answer. share: of the body's bytes, [0, 1), which still go."""

    direction: Literal["up", "down"]
    share: float


class HttpTransport:
    """Speaks to `remote-rl serve` at `url` ("http://host:port" or "https://...").

    token: what the server's --token-file holds; by default the environment's REMOTE_RL_TOKEN.
    ca_file: certificates to trust instead of the system's, for https.
    Used from one event loop, the one of its first call.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | None = None) -> None:
        self._url = _checked_url(url)
        self._token = _checked_token(
            token if token is not None else os.environ.get("REMOTE_RL_TOKEN")
        )
        self._tls = _tls_context(self._url, ca_file)
        self._session: aiohttp.ClientSession | None = None
        self._silences: Silences | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._let_in = 0  # bytes of the largest frame that was, since the last failure

    @property
    def target(self) -> str:
        """The address, without a slash at its end."""
        return self._url

    @property
    def submits(self) -> int:
        """How many submits may be under way at once."""
        return SUBMITS

    def digest(self, request: Request) -> PendingDigest:
        """Of the frame's bytes, of a large one taken while they are sent."""
        return seal(request)

    async def close(self) -> None:
        """Ends the connections; later calls are lost."""
        self._closed = True
        session, self._session = self._session, None
        if self._silences is not None:
            self._silences.close()
        if session is not None:
            await session.close()

    async def call(self, message: Message, timeout: float, cut: Cut | None = None) -> Any:
        """The dispatcher's reply. `timeout`: seconds without a byte in either direction, so that
        a large body on a slow line isn't given up while it moves. `cut`: where to break it off."""
        frame = encode(message)
        if self._silences is None:
            self._silences = Silences()
        reply: Any = None
        try:
            with self._silences.watch(timeout) as silence:
                reply = await self._exchange(message, frame, silence.moved, cut)
        except TimeoutError as error:
            raise ConnectionLost(f"no answer within {timeout:g} s") from error
        finally:  # after a failure, whoever refuses gets to say so before the body comes
            good = not (reply is None or isinstance(reply, RemoteRLError))
            self._let_in = max(self._let_in, frame.nbytes) if good else 0
        if isinstance(reply, RemoteRLError):
            raise reply
        return reply

    async def _exchange(
        self, message: Message, frame: Frame, moved: Callable[[int], None], cut: Cut | None
    ) -> Any:
        import aiohttp

        try:
            async with self._opened().post(
                self._url + route_of(type(message)),
                data=_body(frame, moved, cut),
                headers={"Content-Length": str(frame.nbytes)},
                expect100=frame.nbytes >= ASK_FIRST_BYTES and frame.nbytes > self._let_in,
                allow_redirects=False,
            ) as response:
                said = response.headers.get("Content-Type")  # as it is; parsing it takes longer
                if said != FRAME_TYPE and response.content_type != FRAME_TYPE:
                    moved(0)
                    await self._refuse_foreign(response)
                if cut is not None and cut.direction == "down":
                    await _break_off(response, cut.share)
                body = arrived(response.content)
                if body is None:
                    moved(0)
                    body = await receive(response.content, moved=moved)
        except RemoteRLError:
            raise  # some are also an OSError
        except aiohttp.ClientSSLError as error:
            raise ProtocolError(
                f"no TLS with {self.target}: {error}; check https:// against http://, and give "
                "ca_file= for a certificate of your own"
            ) from error
        except aiohttp.ClientResponseError as error:
            raise self._foreign(f"its answer is not HTTP ({error.message})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error
        try:
            return decode(body)
        except InvalidRequestError as error:
            raise ProtocolError(
                f"the answer of {self.target} can't be read ({error}); install the same remote-rl "
                "on both sides"
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ConnectionLost("the transport is closed")
        if self._session is None:
            import aiohttp

            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers(),
                auto_decompress=False,
                read_bufsize=CHUNK_BYTES,
            )
        if loop is not self._loop:
            raise RuntimeError("an HttpTransport belongs to the event loop of its first call")
        return self._session

    def _headers(self) -> dict[str, str]:
        """Those of every request; each adds its length."""
        headers = {
            "Content-Type": FRAME_TYPE,
            "Accept": FRAME_TYPE,
            "Accept-Encoding": "identity",
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    async def _refuse_foreign(self, response: aiohttp.ClientResponse) -> None:
        """Raises for an answer that no remote_rl server gave."""
        status = f"HTTP {response.status}, {response.content_type}"
        if response.status >= 500 or response.status in NOT_NOW_STATUSES:
            raise ConnectionLost(f"a gateway before it answered {status}")
        if response.status == 401:
            raise AuthenticationError(
                f"{self.target} wants a token ({status}); pass token= or set REMOTE_RL_TOKEN"
            )
        if response.status == 413:
            raise InvalidRequestError(
                f"something before {self.target} takes no message of this size ({status}); raise "
                "its limit, or send the batch in pieces (Batch.split) and a push in smaller ones "
                "(part_bytes=)"
            )
        opening = (await response.content.read(200)).decode("utf-8", "replace").strip()
        raise self._foreign(f"it answered {status}: {opening!r}", status=response.status)

    def _foreign(self, what: str, **details: Any) -> ProtocolError:
        return ProtocolError(
            f"{self.target} is not a remote_rl server: {what}; check host, port and path",
            foreign=True,
            **details,
        )


def _body(frame: Frame, moved: Callable[[int], None], cut: Cut | None) -> Any:
    if cut is not None and cut.direction == "up":
        return _opening(frame, int(cut.share * frame.nbytes))
    if frame.nbytes <= SMALL_BYTES:
        return b"".join(frame.parts)
    return pieces(frame, moved)


async def _opening(frame: Frame, size: int) -> AsyncIterator[bytes | memoryview]:
    """The first `size` bytes of the frame, and then an end in the middle."""
    left = size
    for piece in frame.chunks(CHUNK_BYTES):
        if left < len(piece):
            if left:
                yield piece[:left]
            break
        yield piece
        left -= len(piece)
    raise ConnectionResetError(f"the request was cut off after {size} bytes")


async def _break_off(response: aiohttp.ClientResponse, share: float) -> None:
    """Reads that share of the answer and breaks the connection."""
    size = int(share * (response.content_length or 0))
    with contextlib.suppress(asyncio.IncompleteReadError):
        await response.content.readexactly(size)
    response.close()
    raise ConnectionResetError(f"the answer was cut off after {size} bytes")


def _lost(error: Exception) -> ConnectionLost:
    cause = getattr(error, "os_error", error)  # of a failed connect, aiohttp's own text is longer
    refused = isinstance(cause, ConnectionRefusedError)
    return ConnectionLost(f"{type(cause).__name__}: {cause}".rstrip(": "), refused=refused)


def _checked_token(token: str | None) -> str | None:
    """Without the white space that a file's or a variable's end brings along."""
    if token is None or not token.strip():
        return None
    if not token.strip().isprintable():
        raise InvalidRequestError("the token holds characters that can't be sent", field="token")
    return token.strip()


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where the port is no number
    except ValueError as error:
        raise InvalidRequestError(f"{url!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{url!r} is not an address; write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidRequestError(
            "an address holds no user, query or fragment; pass a secret as token= or in "
            "REMOTE_RL_TOKEN"
        )
    return url.rstrip("/")


def _tls_context(url: str, ca_file: str | None) -> ssl.SSLContext | None:
    if not url.startswith("https:"):
        if ca_file is not None:
            raise InvalidRequestError(f"ca_file= needs an https:// address, not {url!r}")
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidRequestError(f"ca_file={ca_file!r} can't be used: {error}") from error
