"""Arctic backend: one DeepSpeed engine, and everything that reaches into it (imports deepspeed,
torch, the optimizer).

What DeepSpeed 0.19 has no public call for is here and nowhere else: which part of which parameter
a rank owns, giving the model other weights for a while, and discarding gradients at every stage.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.zero import parameter_offload
from torch import Tensor

from .answers import StepResult
from .joining import Configuration
from .optimizer import MOMENTS, PolicyAdamW

#: of DeepSpeed's optimizers at ZeRO 1 to 3: weights and gradients beside those of parameters
_BUFFERS = (
    "bit16_groups_flat",
    "fp16_partitioned_groups_flat",
    "averaged_gradients",
    "all_grad_tensors",
    "grad_partitions_flat_buffer",
    "lp_param_buffer",
)


@attrs.frozen
class Fragment:
    """What a rank owns of a parameter: `length` numbers, from `start` on in the flattened
    parameter, from `offset` on in the rank's master number `master`."""

    name: str
    start: int
    length: int
    master: int
    offset: int


class Zero:
    """A module in DeepSpeed's hands.

    names: of the parameters, by id; only those that require a gradient are trained.
    """

    def __init__(
        self, module: torch.nn.Module, names: Mapping[int, str], told: Configuration
    ) -> None:
        self.stage: int = told["zero_optimization"]["stage"]
        trained = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = PolicyAdamW(trained, partitioned=self.stage > 0)
        self.pulse = 0  # rises with what is done
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=self.optimizer, config=told)
        self._zero: Any = self._engine.optimizer
        self._trained = trained
        self._names = names
        self._waiting_modules = len(parameter_offload.FWD_MODULE_STACK)
        self.fragments = tuple(self._owned())
        if self.stage == 3:
            self._clear_padding()
        self._sizes = self.sizes()
        self._device = self._master_parameters()[0].device

    @property
    def module(self) -> torch.nn.Module:
        """What was given."""
        held: torch.nn.Module = self._engine.module
        return held

    def __call__(self, *arguments: Any) -> Any:
        """Forward."""
        self.pulse += 1
        return self._engine(*arguments)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, summed over ranks, to the accumulator."""
        self.pulse += 1
        # DeepSpeed averages over ranks
        self._engine.backward(loss * torch.distributed.get_world_size(), scale_wrt_gas=False)

    def step(self) -> StepResult:
        """What the armed optimizer makes of the accumulated gradient, which is gone afterwards."""
        self._engine.step()
        return self.optimizer.result()

    # -- masters ------------------------------------------------------------------------------

    @property
    def masters(self) -> Sequence[Tensor]:
        """The float32 weights that this rank owns: whole parameters at 0, where every rank has
        them all, flat partitions elsewhere."""
        if self.stage == 0:
            return [each.data for each in self._trained]
        return [each.data for each in self._master_parameters()]

    def moments(self) -> list[dict[str, Tensor]]:
        """AdamW's moments of each master."""
        return [self.optimizer.moments(each) for each in self._master_parameters()]

    def _master_parameters(self) -> Sequence[Tensor]:
        if self.stage == 0:
            return self._trained
        held: Sequence[Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if self.stage == 3
            else self._zero.single_partition_of_fp32_groups
        )
        return held

    def _owned(self) -> Iterator[Fragment]:
        if self.stage == 0:
            for index, each in enumerate(self._trained):
                yield Fragment(self._names[id(each)], 0, each.numel(), index, 0)
        elif self.stage == 3:
            yield from self._owned_of_partitions()
        else:
            for each in self._trained:
                mapping = each._hp_mapping
                if mapping is not None:
                    whole, part = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield Fragment(
                        self._names[id(each)],
                        whole.start,
                        whole.numel,
                        mapping.param_group_index,
                        part.start,
                    )

    def _owned_of_partitions(self) -> Iterator[Fragment]:
        rank = torch.distributed.get_rank()
        for each in self._trained:
            group, offset, padded = self._zero.grad_position[self._zero.get_param_id(each)]
            start = padded * rank
            length = min(padded, each.ds_numel - start)
            if length > 0:
                yield Fragment(self._names[id(each)], start, length, group, offset)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Where ranks don't divide a parameter DeepSpeed leaves memory as it was found, and a NaN
        there would keep every step from being taken."""
        for master, held in enumerate(self.masters):
            parts = [each for each in self.fragments if each.master == master]
            parts.sort(key=lambda each: each.offset)
            ends = [0, *(each.offset + each.length for each in parts)]
            for end, following in zip(ends, [*(each.offset for each in parts), len(held)]):
                held[end:following] = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the trained parameters, by name."""
        return {
            self._names[id(each)]: tuple(getattr(each, "ds_shape", each.shape))
            for each in self._trained
        }

    def sizes(self) -> dict[str, int]:
        """Numbers in each trained parameter, by name."""
        return {name: math.prod(shape) for name, shape in self.shapes().items()}

    @torch.no_grad()
    def assembled(self, name: str, masters: Sequence[Tensor], rank: int) -> Tensor | None:
        """On `rank`, one parameter's flat float32 numbers out of the parts that the ranks have of
        it in `masters` (laid out as the masters are); None elsewhere. Every rank takes part."""
        self.pulse += 1
        own = torch.distributed.get_rank() == rank
        parts = [each for each in self.fragments if each.name == name]
        if self.stage == 0:
            return masters[parts[0].master].reshape(-1) if own else None
        whole = torch.zeros(self._sizes[name], dtype=torch.float32, device=self._device)
        for each in parts:
            flat = masters[each.master].reshape(-1)
            whole[each.start : each.start + each.length] = flat[
                each.offset : each.offset + each.length
            ].to(self._device)
        torch.distributed.reduce(whole, rank)  # each number is one rank's, and zero elsewhere
        return whole if own else None

    @torch.no_grad()
    def refresh(self) -> None:
        """After the masters were written: the model's own weights follow."""
        if self.stage in (1, 2):
            self._zero.update_lp_params()
        elif self.stage == 3:
            self._zero._partition_all_parameters()
            for group, master in enumerate(self._zero.fp32_partitioned_groups_flat):
                own = self._zero.fp16_partitioned_groups_flat[group].data
                if own.data_ptr() != master.data_ptr():  # float32 models are their own masters
                    own.copy_(master.data)
                self._zero._unflatten_partitioned_parameters(group)
            self._gather_kept()

    @contextlib.contextmanager
    def showing(self, masters: Sequence[Tensor]) -> Iterator[None]:
        """Within, the model has other weights, given as this rank's masters on any device; the
        masters stay, and the model follows them again afterwards, whatever happens."""
        if self.stage == 0:
            with self._showing_whole(masters):
                yield
            return
        try:
            with torch.no_grad():
                self._show(masters)
            yield
        finally:
            self.refresh()

    @contextlib.contextmanager
    def _showing_whole(self, masters: Sequence[Tensor]) -> Iterator[None]:
        own = [each.data for each in self._trained]
        try:
            for each, other in zip(self._trained, masters, strict=True):
                each.data = other.to(each.device, each.dtype)
            yield
        finally:
            for each, data in zip(self._trained, own, strict=True):
                each.data = data

    def _show(self, masters: Sequence[Tensor]) -> None:
        if self.stage == 3:
            self._zero._partition_all_parameters()
            for group, master in enumerate(masters):
                own = self._zero.fp16_partitioned_groups_flat[group]
                flat = master.to(own.device, own.dtype)
                partitions = self._zero.fp16_partitioned_groups[group]
                for part, data in zip(partitions, self._zero.unflatten(flat, partitions)):
                    part.data = data.data
            self._gather_kept()
            return
        for group, master in enumerate(masters):
            rank = torch.distributed.get_rank(group=self._zero.real_dp_process_group[group])
            self._zero.parallel_partitioned_bit16_groups[group][rank].data.copy_(master)
        _all_gather(self._zero)

    def _gather_kept(self) -> None:
        kept = self._zero.persistent_parameters
        if kept:
            kept[0].all_gather(kept)

    def gathered(self, parameters: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within, these parameters are whole on every rank; every rank takes part."""
        self.pulse += 1
        if self.stage < 3:
            return contextlib.nullcontext()
        gather: Callable[..., contextlib.AbstractContextManager[None]]
        gather = deepspeed.zero.GatheredParameters
        return gather(list(parameters))

    def memory(self) -> list[Any]:
        """All tensors whose size follows the model's, in lists and mappings: weights, gradients,
        masters, moments and DeepSpeed's flat buffers. Several may share memory."""
        held: list[Any] = [*self.module.parameters(), *self._master_parameters()]
        held += [getattr(each, name, None) for each in held for name in ("grad", "ds_tensor")]
        held += [state.get(name) for state in self.optimizer.state.values() for name in MOMENTS]
        if self.stage > 0:
            held += [getattr(self._zero, name, None) for name in _BUFFERS]
        return held

    # -- discarding ---------------------------------------------------------------------------

    def discard(self) -> None:
        """Drops all accumulated gradient, also what a forward or backward left that raised
        half-way. No rank needs another one for it."""
        for each in self.module.parameters():
            each.grad = None
        self._engine._unmanaged_backward_count = 0
        self._engine._running_engine_step = False
        if self.stage == 0:
            return
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero._backward_hook_state.reset_for_new_step()
        zero._backward_active_depth = 0
        zero._remaining_grad_acc_hooks = 0
        zero.set_gradient_accumulation_boundary(False)
        if self.stage == 3:
            self._discard_partitions()
        else:
            self._discard_buckets()

    def _discard_buckets(self) -> None:
        zero = self._zero
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in held:
                held[group] = None
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()
        zero.micro_step_id = -1

    def _discard_partitions(self) -> None:
        zero = self._zero
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        for name in zero.params_already_reduced:
            zero.params_already_reduced[name] = False
        zero.averaged_gradients = {}
        zero.grad_partitions_flat_buffer.zero_()
        zero._epilogue_ran_this_backward = False
        zero.micro_step_id = 0
        self._engine._forward_epilogue()
        del parameter_offload.FWD_MODULE_STACK[self._waiting_modules :]
        zero.parameter_offload.release_backward_leftovers()

    def close(self) -> None:
        """Lets go of the module."""
        self._engine.destroy()


def _all_gather(zero: Any) -> None:
    from deepspeed.runtime.utils import all_gather_dp_groups as gather

    gather(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
