"""Weights of single experts: in memory, in the checkpoint, and as messages."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baton_engine.models.checkpoint.loader import read_ahead, read_slices, read_tensor_index
from baton_engine.models.layers import Model
from baton_engine.models.sparse_moe import SparseMoE
from baton_kernels.linear import PackedWeight, QuantizedWeight, Weight, packing
from baton_kernels.linear.quantized import Bits
from baton_kernels.moe import ExpertList, ExpertWeights


class ExpertKey(NamedTuple):
    """Identifies an expert of the model."""

    #: Index among the sparse layers.
    layer: int
    expert: int


class Expert(NamedTuple):
    """This tensor rank's part of the weights of one expert."""

    gate_up: Weight
    down: Weight


class ExpertForm(enum.Enum):
    """Storage format of the weights of experts: plain, packed or quantized."""

    PLAIN = enum.auto()
    PACKED = enum.auto()
    INT8 = enum.auto()
    INT4 = enum.auto()


_BITS: dict[ExpertForm, Bits] = {ExpertForm.INT8: 8, ExpertForm.INT4: 4}


def expert_form(quantization: str | None, dtype: torch.dtype, device: torch.device) -> ExpertForm:
    """Return the storage format of experts for a quantization, dtype and device.

    The module `packed_weights` uses the same format for attention and dense MLP layers.
    """
    if quantization is not None:
        return ExpertForm[quantization.upper()]
    return ExpertForm.PLAIN if packing(dtype, device) is None else ExpertForm.PACKED


class ExpertStore:
    """Creates experts of one model from its checkpoint, or from another rank's messages.

    Messages carry plain or quantized weights in host memory. Packed weights are unpacked before
    they are sent, without loss. All methods can be called from any thread.
    """

    def __init__(
        self,
        path: Path,
        model: Model,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm,
    ) -> None:
        """Open the checkpoint.

        Args:
            path: folder of the checkpoint. Names and shapes were checked when `model` was loaded.
            model: loaded expert-parallel model.
            dtype: dtype of plain and packed weights.
            device: device on which experts are created.
            form: storage format of experts.
        """
        self.device = device
        self.num_experts = model.config.num_experts
        self._entries = read_tensor_index(path)
        self._layers = model.sparse_layers
        self._dtype, self._form = dtype, form

    @property
    def layers(self) -> list[SparseMoE]:
        return [layer for _, layer in self._layers]

    def read(self, key: ExpertKey) -> Expert:
        """Read this tensor rank's slices of an expert from the checkpoint.

        Raises:
            ModelInvalid: the slices cannot be read.
        """
        prefix, layer = self._layers[key.layer]
        gate_up, down = layer.new_expert(self._dtype, self.device)
        targets = layer.expert_targets(prefix, key.expert, gate_up, down)
        read_ahead(self._entries, targets)  # does not hold the GIL, so concurrent steps continue
        read_slices(self._entries, targets)
        return Expert(self._prepare(gate_up), self._prepare(down))

    def to_parts(self, expert: Expert) -> list[Tensor]:
        """Return an expert as plain or quantized tensors in host memory, ready to be sent."""
        return [part for weight in expert for part in _parts_of(weight)]

    def new_parts(self, key: ExpertKey) -> list[Tensor]:
        """Return uninitialized tensors that receive the parts of an expert from another rank."""
        shapes = [
            weight.shape
            for weight in self._layers[key.layer][1].new_expert(self._dtype, torch.device("meta"))
        ]
        if (bits := _BITS.get(self._form)) is None:
            return [torch.empty(shape, dtype=self._dtype) for shape in shapes]
        return [part for shape in shapes for part in QuantizedWeight.new_parts(shape, bits)]

    def from_parts(self, parts: list[Tensor]) -> Expert:
        """Build an expert from tensors that `to_parts` has returned on another rank."""
        if self._form in _BITS:
            values_and_scales = zip(parts[::2], parts[1::2], strict=True)
            return Expert(*(QuantizedWeight.from_parts(*parts) for parts in values_and_scales))
        return Expert(*(self._prepare(part.to(self.device)) for part in parts))

    def _prepare(self, weight: Tensor) -> Weight:
        match self._form:
            case ExpertForm.PLAIN:
                return weight
            case ExpertForm.PACKED:
                return PackedWeight(weight)
            case form:
                return QuantizedWeight(weight, _BITS[form])


def stack_experts(
    experts: Iterable[Expert], device: torch.device
) -> tuple[ExpertWeights, ExpertWeights]:
    """Return the (gate_up, down) weights of several experts, in the form that `run_experts` takes.

    On a CPU, the results are tuples that share the memory of `experts`. On a GPU, they are stacked
    copies.
    """
    gate_up, down = zip(*experts, strict=True)
    if device.type == "cpu":
        return ExpertList(gate_up), ExpertList(down)
    return torch.stack(gate_up), torch.stack(down)


def _parts_of(weight: Weight) -> list[Tensor]:
    if isinstance(weight, QuantizedWeight):
        return list(weight.parts())
    return [weight.unpack() if isinstance(weight, PackedWeight) else weight.cpu().contiguous()]
