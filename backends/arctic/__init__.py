"""Arctic backend: DeepSpeed training and vLLM sampling on Ray.

`create` is the entry point `arctic` of the group `remote_rl.backends`; it imports the rest when it
is called, and nothing heavy even then: torch, ray, deepspeed and vllm live in processes of their
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import ArcticBackend

__all__ = ["create"]


def create(*, model: Any = None, **options: Any) -> ArcticBackend:
    """A backend that has not been started. model: the path of a Hugging Face directory, or a
    mapping of `config.ModelConfig`'s fields; options: the other fields of `config.ArcticConfig`.

    Raises `UnknownNameError` for an option that does not exist, with the nearest that does,
    `InvalidRequestError` for a value out of range or a model that isn't there, and
    `UnsupportedError` where a package is missing.
    """
    from .backend import ArcticBackend
    from .config import ArcticConfig, as_config

    return ArcticBackend(as_config(ArcticConfig, {"model": model, **options}))
