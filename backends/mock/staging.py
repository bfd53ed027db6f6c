"""Mock backend: tensors of a push that comes in parts, until they are all there (imports numpy and
the contract)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from remote_rl.types import Piece, Tensor, TensorForm
from remote_rl.types.arrays import Array
from remote_rl.types.results import TENSOR_DTYPES


class Staging:
    """One set of tensors at most, apart from what the sampler serves. Which pieces come, and in
    which order, the dispatcher has seen to."""

    def __init__(self) -> None:
        self._forms: Mapping[str, TensorForm] = {}
        self._bytes: dict[str, Array] = {}

    def begin(self, forms: Mapping[str, TensorForm]) -> None:
        """Room for these tensors; what was kept before is dropped."""
        self.drop()
        self._bytes = {name: np.zeros(form.nbytes, np.uint8) for name, form in forms.items()}
        self._forms = forms

    def write(self, pieces: Mapping[str, Piece]) -> None:
        """Each piece at its place."""
        for name, piece in pieces.items():
            self._bytes[name][piece.offset : piece.end] = piece.data

    def take(self) -> dict[str, Tensor]:
        """The tensors; they are no longer kept."""
        tensors = {
            name: Tensor(
                data=self._bytes[name].view(TENSOR_DTYPES[form.dtype]).reshape(form.shape),
                dtype=form.dtype,
            )
            for name, form in self._forms.items()
        }
        self.drop()
        return tensors

    def drop(self) -> None:
        """Nothing is kept any more."""
        self._forms, self._bytes = {}, {}
