"""A Ray cluster of its own, which ends with the end of its stdin: prints its address and folder.

Run as a program, by `conftest.py`, with the folder as its argument; its parent's death ends it.
"""

from __future__ import annotations

import json
import sys

import ray


def main(folder: str) -> None:
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=400 << 20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
