"""TLS with real certificates: who is trusted, and what is said where something doesn't fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme
from command_support import remote_rl
from cryptography.hazmat.primitives import serialization
from http_support import LONG, RENEW, Scripted, in_loop, listening, speaking

from remote_rl.errors import AuthenticationError, InvalidRequestError, ProtocolError
from remote_rl.messages import ConnectionLost, Renewed
from remote_rl.server.app import application
from remote_rl.server.serve import Endpoint
from remote_rl.transports.http import HttpTransport


class Files:
    """Certificates of one authority, of another one, and for another host, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = trustme.CA()
        self.authority = self.file("ca.pem", authority.cert_pem.bytes())
        self.other_authority = self.file("other.pem", trustme.CA().cert_pem.bytes())
        own = authority.issue_cert("localhost", "127.0.0.1")
        self.own = self.file("own.pem", own.private_key_and_cert_chain_pem.bytes())
        self.chain = self.file("chain.pem", own.cert_chain_pems[0].bytes())
        self.key = self.file("key.pem", own.private_key_pem.bytes())
        elsewhere = authority.issue_cert("elsewhere.example")
        self.elsewhere = self.file("else.pem", elsewhere.private_key_and_cert_chain_pem.bytes())
        loaded = serialization.load_pem_private_key(own.private_key_pem.bytes(), None)
        encrypted = loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
        self.encrypted = self.file("encrypted.pem", encrypted)
        self.garbage = self.file("garbage.pem", b"no PEM at all")

    def file(self, name: str, contents: bytes) -> str:
        path = self.folder / name
        path.write_bytes(contents)
        return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def listening_with(certificate: str, key: str | None = None, **options: Any) -> Any:
    context = Endpoint(certificate=certificate, key=key).tls()
    return listening(application(Scripted(), **options), ssl_context=context)


@pytest.mark.parametrize("separate_key", [False, True])
@in_loop
async def test_messages_cross_where_the_authority_is_trusted(
    files: Files, separate_key: bool
) -> None:
    pair = (files.chain, files.key) if separate_key else (files.own, None)
    async with listening_with(*pair, token="s3cret") as (url, _):
        async with speaking(url, ca_file=files.authority, token="s3cret") as transport:
            assert await transport.call(RENEW, LONG) == Renewed(lease_seconds=60)
        async with speaking(url, ca_file=files.authority, token="wrong") as transport:
            with pytest.raises(AuthenticationError):
                await transport.call(RENEW, LONG)


@in_loop
async def test_an_authority_that_is_not_trusted_ends_the_call_before_the_token_is_sent(
    files: Files,
) -> None:
    async with listening_with(files.own) as (url, app_runner):
        for trusted in (files.other_authority, None):
            async with speaking(url, ca_file=trusted, token="s3cret") as transport:
                with pytest.raises(ProtocolError, match=r"verify failed.*ca_file="):
                    await transport.call(RENEW, LONG)
        assert not app_runner.server.requests_count


@in_loop
async def test_a_certificate_of_another_host_is_refused_by_the_name(files: Files) -> None:
    async with listening_with(files.elsewhere) as (url, _):
        for host in ("127.0.0.1", "localhost"):
            address = url.replace("127.0.0.1", host)
            async with speaking(address, ca_file=files.authority) as transport:
                with pytest.raises(ProtocolError, match=f"not valid for '{host}'"):
                    await transport.call(RENEW, LONG)


@in_loop
async def test_https_to_a_plain_server_says_what_to_check(files: Files) -> None:
    async with listening(application(Scripted())) as (url, _):
        address = url.replace("http:", "https:")
        async with speaking(address, ca_file=files.authority) as transport:
            with pytest.raises(ProtocolError, match="check https:// against http://"):
                await transport.call(RENEW, LONG)


@in_loop
async def test_http_to_a_tls_server_is_never_answered_and_info_says_what_to_check(
    files: Files,
) -> None:
    async with listening_with(files.own) as (url, _):
        address = url.replace("https:", "http:")
        async with speaking(address) as transport:
            with pytest.raises(ConnectionLost):
                await transport.call(RENEW, LONG)
        result = await asyncio.to_thread(remote_rl, "info", address)
    assert result.returncode == 1
    assert "without TLS (https://)" in result.stderr


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("no-such.pem", None, "No such file"),
        ("garbage", None, "can't be used"),
        ("authority", None, "can't be used"),  # a certificate without a key
        ("chain", "no-such-key.pem", "No such file"),
        ("chain", "garbage", "can't be used"),
        ("chain", "elsewhere", "mismatch"),
        ("chain", "encrypted", "without a passphrase"),  # nobody is there to type one
        (None, "key", "without a certificate"),
    ],
)
def test_what_can_not_be_served_with_is_said_before_anything_starts(
    files: Files, certificate: str | None, key: str | None, said: str
) -> None:
    names = [name and getattr(files, name, name) for name in (certificate, key)]
    with pytest.raises(InvalidRequestError, match=said):
        Endpoint(certificate=names[0], key=names[1]).tls()


def test_authorities_that_can_not_be_read_are_said_at_once(files: Files, tmp_path: Path) -> None:
    for path in (files.garbage, str(tmp_path), str(tmp_path / "none.pem")):
        with pytest.raises(InvalidRequestError, match="ca_file="):
            HttpTransport("https://localhost", ca_file=path)
