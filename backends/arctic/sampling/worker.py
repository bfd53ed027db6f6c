"""Arctic backend: what vLLM's workers do for us, beside their own (imports vllm, drawing,
transfer).

vLLM adds the methods of `SamplerWorker` to its worker class (worker_extension_cls) and calls them
by `collective_rpc`.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise

from ..weights.manifest import Manifest
from . import transfer as transfer  # registers the worker engine for shared memory
from .drawing import TwofoldSampler


class SamplerWorker:
    """Mixed into vLLM's worker; every name begins with remote_rl."""

    # of vLLM's worker
    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: Any

    def remote_rl_install(self, serial: int) -> None:
        """Draws with our sampler from now on; serial: of the weights that are there."""
        # it warns at each update that rotary embeddings, which have no weights, loaded none; that
        # all weights come is checked by name, and what was loaded by its fingerprint
        logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
        self.model_runner.sampler = TwofoldSampler(self.model_runner, serial)

    def remote_rl_update(self, update_info: dict[str, Any], serial: int) -> str | None:
        """Takes new weights over; the fingerprint of what was loaded, None where vLLM's own worker
        engines don't tell. Raises what went wrong; the model then holds a mixture of old and new
        weights, every tensor in its place, so that a later update can mend it."""
        worker: Any = self
        worker.start_weight_update()
        try:
            worker.update_weights(update_info)
            worker.finish_weight_update()
        except BaseException:
            self._remote_rl_put_back()
            raise
        self._remote_rl_pack_tied_head()
        self.model_runner.sampler.serial = serial
        taken = getattr(worker.weight_transfer_engine, "taken", None)
        return None if taken is None else Manifest(taken).fingerprint

    def remote_rl_clear_cache(self) -> None:
        """Makes the KV cache's memory zero."""
        _zero(self.model_runner.kv_caches)

    def _remote_rl_put_back(self) -> None:
        """After a failure: no layer stays without its tensors."""
        worker: Any = self
        worker._weight_update_active = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._remote_rl_pack_tied_head()

    def _remote_rl_pack_tied_head(self) -> None:
        """A head that shares the embedding's tensor has no weights of its own to load, so vLLM
        leaves the copy that it packed for the CPU as it was."""
        model = self.model_runner.model
        head = getattr(model, "lm_head", None)
        if self.device.type != "cpu" or not hasattr(head, "cpu_linear"):
            return
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _zero(caches: Any) -> None:
    if isinstance(caches, list | tuple):
        for each in caches:
            _zero(each)
    else:
        caches.zero_()
