"""Arctic backend: torch's AdamW with the knobs of each call, global clipping, and steps that are
taken whole or not at all (imports torch, remote_rl's types)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed
from torch import Tensor
from torch.optim.adamw import adamw

from remote_rl.types import AdamW

from .answers import StepResult

#: numbers looked at in one go where a copy of them is made
_CHUNK = 1 << 22
#: what no float32 of a step may come near; its own limit is 3.4e38
_SAFE = 1e37
#: a gradient below it has a square below _SAFE
_SAFE_GRADIENT = 1e18
#: an eps below it may vanish in float32
_SAFE_EPS = 1e-30

MOMENTS = ("exp_avg", "exp_avg_sq")


class PolicyAdamW(torch.optim.AdamW):
    """The optimizer that DeepSpeed holds. It sees the float32 masters that its rank owns: flat
    partitions of them at ZeRO 1 to 3, whole parameters at 0.

    DeepSpeed calls `step` once for each `engine.step()`, between its reduction of gradients and
    its gathering of weights, so what is decided here is decided for all ranks together.
    partitioned: whether the ranks hold different parts.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, partitioned: bool) -> None:
        super().__init__(parameters, lr=0.0)
        self._partitioned = partitioned
        self._options: AdamW | None = None
        self._result: StepResult | None = None
        self.steps = 0

    def arm(self, options: AdamW) -> None:
        """Before each step: what it is to be taken with."""
        self._options, self._result = options, None

    def result(self) -> StepResult:
        """After `engine.step()`. DeepSpeed itself ends a step at ZeRO 3 where the gradient is not
        finite, and then `step` was never called."""
        return self._result or StepResult(math.inf, True, self.steps)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Measures, clips, and moves the weights, or leaves everything as it is where the gradient
        or what the step would give is not finite."""
        options = self._options
        if options is None:
            raise RuntimeError("PolicyAdamW.step was called without arm(options) before it")
        self._options = None
        norm = self._gradient_norm()
        taken = math.isfinite(norm)
        if taken:
            self._use(options)
            self._clip(norm, options.max_grad_norm)
            taken = self._agreed(self._surely_finite(norm) or self._finite_when_tried())
        if taken:
            super().step()
            self.steps += 1
        self._result = StepResult(norm, not taken, self.steps)

    # -- moments, for checkpoints ---------------------------------------------------------------

    def moments(self, master: Tensor) -> dict[str, Tensor]:
        """First and second moment of a master, in the order of MOMENTS; made where the optimizer
        has not stepped yet."""
        state = self.state[master]
        if not state:
            state["step"] = torch.tensor(float(self.steps))
            for name in MOMENTS:
                state[name] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return {name: state[name] for name in MOMENTS}

    def set_steps(self, steps: int) -> None:
        """How many steps count as taken, for the correction of the moments' bias."""
        self.steps = steps
        for state in self.state.values():
            if state:
                state["step"].fill_(float(steps))

    def forget(self) -> None:
        """As before the first step. In place, since DeepSpeed keeps views of the moments."""
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name].zero_()
        self.set_steps(0)

    # -- one step -----------------------------------------------------------------------------

    def _held(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from (each for each in group["params"] if each.grad is not None)

    def _gradient_norm(self) -> float:
        device = self._device()
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for master in self._held():
            for chunk in _gradient(master).reshape(-1).split(_CHUNK):
                squares += torch.linalg.vector_norm(chunk, dtype=torch.float64) ** 2
        if self._partitioned:
            torch.distributed.all_reduce(squares)
        return math.sqrt(float(squares)) if float(squares) >= 0 else math.nan

    def _device(self) -> torch.device:
        for group in self.param_groups:
            for master in group["params"]:
                device: torch.device = master.device
                return device
        return torch.device("cpu")

    def _use(self, options: AdamW) -> None:
        for group in self.param_groups:
            group.update(
                lr=options.lr,
                betas=options.betas,
                eps=options.eps,
                weight_decay=options.weight_decay,
            )

    def _clip(self, norm: float, most: float | None) -> None:
        # the factor of torch.nn.utils.clip_grad_norm_
        if most is not None and most / (norm + 1e-6) < 1:
            for master in self._held():
                _gradient(master).mul_(most / (norm + 1e-6))

    def _agreed(self, fine: bool) -> bool:
        """Whether it is fine on every rank."""
        if not self._partitioned:
            return fine
        flag = torch.tensor(int(fine), dtype=torch.int32, device=self._device())
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    def _surely_finite(self, norm: float) -> bool:
        """A bound that says so for any usual step, from the largest weight and moment alone; False
        where the step has to be tried."""
        group = self.param_groups[0]
        beta1, _ = group["betas"]
        if group["eps"] < _SAFE_EPS or norm > _SAFE_GRADIENT:
            return False
        weights, moments = [0.0], [norm]
        for master in self._held():
            weights.append(_largest(master))
            if self.state[master]:
                moments.append(_largest(self.state[master]["exp_avg"]))
        decayed = sum(weights) * abs(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] / (1 - beta1 ** (self.steps + 1)) * sum(moments) / group["eps"]
        return bool(decayed + size < _SAFE)  # False for NaN

    def _finite_when_tried(self) -> bool:
        """Whether the step gives finite weights and moments, computed on copies, a chunk at a time,
        by torch's own formula."""
        group = self.param_groups[0]
        knobs = (
            group["eps"],
            group["lr"] / (1 - group["betas"][0] ** (self.steps + 1)),
            abs(1 - group["lr"] * group["weight_decay"]),
        )
        if max(knobs) > torch.finfo(torch.float32).max:
            return False
        for master in self._held():
            held = [master, _gradient(master), *self._moments_or_zeros(master)]
            for pieces in zip(*(each.reshape(-1).split(_CHUNK) for each in held), strict=True):
                weight, slope, first, second = (piece.clone() for piece in pieces)
                adamw(
                    [weight],
                    [slope],
                    [first],
                    [second],
                    [],
                    [torch.tensor(float(self.steps))],
                    foreach=False,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                if not all(bool(each.isfinite().all()) for each in (weight, first, second)):
                    return False
        return True

    def _moments_or_zeros(self, master: Tensor) -> list[Tensor]:
        state = self.state[master]
        if state:
            return [state[name] for name in MOMENTS]
        return [torch.zeros((), device=master.device).expand(master.shape) for _ in MOMENTS]


def _largest(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, math.inf)) if tensor.numel() else 0.0


def _gradient(master: Tensor) -> Tensor:
    assert master.grad is not None, "only masters with a gradient are held"
    return master.grad
