"""A client that knows docs/protocol.md alone trains a step, and the page's tables are whole."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from pages import PORT, blocks_of

from remote_rl import connect
from remote_rl.messages import MESSAGES
from remote_rl.ops import OPERATIONS
from remote_rl.transports.bodies import ROUTES
from remote_rl.wire import MAGIC
from remote_rl.wire.frames import _DTYPES
from remote_rl.wire.vocabulary import wire_classes

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
PATIENCE = 60


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of `remote-rl serve mock`, stopped at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "remote_rl", "serve", "mock", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
            assert ready, "the server said nothing"
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            yield found.group()
        finally:
            process.terminate()


def client_of(url: str) -> str:
    """The page's own client, as one program."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "python"]
    assert not any(block.reason for block in blocks)
    program = "".join(block.code for block in blocks)
    assert f"http://127.0.0.1:{PORT}" in program
    return program.replace(f"http://127.0.0.1:{PORT}", url)


def test_a_client_of_the_page_alone_trains_a_step() -> None:
    with server() as url:
        # isolated and without site-packages: neither remote_rl nor numpy can be imported there
        alone = [sys.executable, "-I", "-S", "-c"]
        missing = subprocess.run([*alone, "import remote_rl"], capture_output=True, text=True)
        assert "ModuleNotFoundError" in missing.stderr
        done = subprocess.run(
            [*alone, client_of(url)], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        with connect(url, start="current") as session:
            assert session.weights.version().result().trainer == 1


def table_rows(first: str) -> dict[str, list[str]]:
    """The rows of the table whose head begins with `first`, by each name of their first cell."""
    lines = iter(PAGE.splitlines())
    rows: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                cells = re.split(r"(?<!\\)\|", row)[1:-1]
                for name in re.findall(r"`([^`]+)`", cells[0]):
                    rows[name] = [cell.strip() for cell in cells]
    return rows


def test_the_table_of_operations_is_that_of_the_code() -> None:
    rows = table_rows("operation")
    assert list(rows) == list(OPERATIONS)
    for name, row in OPERATIONS.items():
        _, stream, request, result = rows[name]
        assert stream == f"`{row.stream.value}`"
        assert result == f"`{row.response.__name__}`"
        named = re.findall(r"`(\w+)`", request)
        fields = [field.name for field in attrs.fields(row.request) if field.name != "model"]
        assert named[0] == row.request.__name__
        assert sorted(named[1:]) == sorted(fields), name


def test_every_message_has_its_path_and_its_fields() -> None:
    paths = table_rows("path")
    assert sorted(paths) == sorted(ROUTES)
    for path, message in ROUTES.items():
        assert f"`{message.__name__}`" in paths[path][1]
    fields_of = table_rows("class")
    common = {"client_id", "instance_id", "acknowledged"}
    for message in MESSAGES:
        assert message.__name__ in fields_of, message.__name__
        told = set(re.findall(r"`(\w+)`", fields_of[message.__name__][1]))
        fields = {field.name for field in attrs.fields(message)}
        if message.__name__ not in ("Attach", "Grant", "RunStatus", "RunInfo"):
            fields -= common
        assert told >= fields or message.__name__ == "RunStatus", (message.__name__, fields - told)


@pytest.mark.parametrize(
    "name",
    ["Ragged", "Batch", "SamplingParams", "AdamW", "PPO", "CISPO", "ImportanceSampling", "KL"]
    + [
        "Reinforce",
        "CrossEntropy",
        "Cotangents",
        "Aggregation",
        "Entropy",
        "Tensor",
        "TensorForm",
        "Piece",
        "Outputs",
    ]
    + ["ForwardBackwardResult", "OptimStepResult", "Done", "Generation", "SyncReceipt"]
    + ["WeightsVersion", "CheckpointInfo", "RunInfo", "ModelInfo", "Capabilities", "Devices"]
    + ["Work"],
)
def test_every_object_of_the_page_has_all_its_fields(name: str) -> None:
    row = table_rows("class")[name]
    told = set(re.findall(r"`(\w+)`", row[1]))
    fields = {
        field.name
        for field in attrs.fields(wire_classes()[name])
        if field.init and field.metadata.get("remote_rl.kind") not in ("local", "reserved")
    }
    assert fields <= told, fields - told


def test_the_page_names_every_dtype_and_the_magic() -> None:
    assert f"`{MAGIC.decode()}`" in PAGE
    listed = re.search(r"`dtype` is one of `([^`]+)`", PAGE)
    assert listed is not None
    assert set(listed.group(1).split()) == set(_DTYPES)
