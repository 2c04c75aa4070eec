# Licensed under the Apache License 2.0, see the LICENSE file.

"""What the variants (LoRA, the adapters, IA3) have in common: loading, saving and training only what is theirs.

A variant is the plain model made from other parts (`litgpt.model.Layers`). It says of its tensors only how their names
are recognised; everything here follows from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn as nn
from torch import Tensor

from litgpt import model as base
from litgpt.errors import UserError

_LISTED = 5  # names of one kind in a message


class VariantGPT(base.GPT):
    """A model with tensors that the plain model lacks.

    Attributes:
        added: parts of names; a tensor whose name has one of them is the variant's own.
        trained: the same for tensors of the plain model that the variant trains and saves as well.
        constant: the same for tensors of its own that it saves and does not train.
    """

    added: ClassVar[tuple[str, ...]] = ()
    trained: ClassVar[tuple[str, ...]] = ()
    constant: ClassVar[tuple[str, ...]] = ()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint of the plain model or of this variant.

        Of a plain one, exactly the variant's own tensors may be missing; they get their initial values.

        Args:
            state_dict: names as in the plain model or as in this one.
            strict: refuse anything else that is missing or unexpected.
            assign: take the tensors instead of copying them.

        Returns:
            The missing and the unexpected names, as `torch.nn.Module.load_state_dict` does.

        Raises:
            UserError: names every tensor that is missing or unexpected.
        """
        own = {key for key in self.state_dict() if _has(key, self.added)}
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = set(found.missing_keys)
        if own <= missing:
            reset_added(self)
            missing -= own
        if strict:
            _refuse({"missing": missing, "unexpected": found.unexpected_keys}, "the checkpoint")
        return found

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if any(_has(name, self.added) for name, _ in module.named_parameters(recurse=False)):
            cast(Any, module).reset_parameters()


class WrappedLinear(nn.Module):
    """A linear map `linear` with a variant's tensors beside it. Reads the plain map's checkpoint.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        **kwargs: of `torch.nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, **kwargs: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, **kwargs)
        self.in_features = in_features
        self.out_features = out_features

    @property
    def bias(self) -> Tensor | None:
        """The bias of the plain map."""
        return self.linear.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [f"{prefix}weight", f"{prefix}bias"]:
            if key in state_dict:
                state_dict[f"{prefix}linear.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def dense_weight(linear: nn.Module) -> Tensor:
    """The weight `(n_out, n_in)` of a linear map, unpacked if it is stored in few bits (bitsandbytes, torchao).

    Raises:
        ValueError: it is stored in a way that is not known here.
    """
    if isinstance(linear.weight, nn.Module):  # of experts
        return cast(Any, linear.weight).dense()
    weight: Tensor = linear.weight
    if (state := getattr(weight, "quant_state", None)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, state)
    if type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    if not weight.is_floating_point():
        raise ValueError(f"a weight stored as {weight.dtype} cannot be read: load the base without --quantize")
    return weight


def variant_filter(model: VariantGPT, key: str) -> bool:
    """Whether the tensor `key` belongs in the variant's file."""
    return _has(key, model.added + model.trained)


def variant_state_dict(model: VariantGPT) -> dict[str, Tensor]:
    """The tensors that belong in the variant's file, under LitGPT's names; they share memory with the model."""
    return {key: value for key, value in model.state_dict().items() if variant_filter(model, key)}


@torch.no_grad()
def load_variant(model: VariantGPT, state: Mapping[str, Tensor], source: str = "the file") -> None:
    """Put what a variant learnt into a model. Nothing is changed when something does not fit.

    Args:
        model: a model of the same variant, its base loaded.
        state: as `variant_state_dict` gives it; other dtypes are converted.
        source: named in the error.

    Raises:
        UserError: names every tensor that is missing, unexpected or of the wrong shape.
    """
    places = variant_state_dict(model)
    wrong = [
        f"{key} {list(state[key].shape)} instead of {list(place.shape)}"
        for key, place in places.items()
        if key in state and state[key].shape != place.shape
    ]
    problems = {"missing": places.keys() - state.keys(), "unexpected": state.keys() - places.keys()}
    _refuse({**problems, "of the wrong shape": wrong}, source)
    for key, place in places.items():
        place.copy_(state[key])


def mark_only_variant_as_trainable(model: VariantGPT) -> None:
    """Freeze every parameter that the variant does not train.

    Raises:
        ValueError: the variant adds nothing to this model, so there would be nothing to train.
    """
    if not any(_has(key, model.added) for key, _ in model.named_parameters()):
        raise ValueError(f"{type(model).__module__} adds nothing to this model: nothing would be trained")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = variant_filter(model, name) and not _has(name, model.constant)


def reset_added(model: VariantGPT) -> None:
    """Give the variant's own tensors their initial values."""
    for module in model.modules():
        if any(_has(name, model.added) for name, _ in module.named_parameters(recurse=False)):
            cast(Any, module).reset_parameters()


class Adapters:
    """Several trained sets of a variant's tensors for one model in memory, by name.

    Make it when the base is loaded and nothing was trained yet: what the model holds then is what it goes back to when
    no adapter is used.

    Args:
        model: a model of the variant, large enough for every adapter.
    """

    def __init__(self, model: VariantGPT) -> None:
        self.model = model
        self.used: str | None = None
        self._states: dict[str | None, dict[str, Tensor]] = {None: _copied(variant_state_dict(model))}

    @property
    def names(self) -> list[str]:
        """The adapters that can be used."""
        return [name for name in self._states if name is not None]

    def add(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Keep a set of tensors, as `load_variant` takes it, under a name; a set of that name is replaced.

        Raises:
            UserError: the tensors do not fit the model.
        """
        if name == self.used:
            self.use(None)
        current = _copied(variant_state_dict(self.model))
        load_variant(self.model, state, f"adapter {name!r}")
        self._states[name] = _copied(variant_state_dict(self.model))
        load_variant(self.model, current)

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        if name == self.used:
            self.use(None)
        self._state(name)
        del self._states[name]

    def use(self, name: str | None) -> None:
        """Switch to an adapter; None is the model without any.

        Raises:
            ValueError: there is no adapter of that name.
        """
        load_variant(self.model, self._state(name))
        self.used = name

    def _state(self, name: str | None) -> dict[str, Tensor]:
        if name not in self._states:
            raise ValueError(f"there is no adapter {name!r}: {', '.join(self.names) or 'none'} can be used")
        return self._states[name]


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in state.items()}


def _has(key: str, parts: Iterable[str]) -> bool:
    return any(part in key for part in parts)


def _refuse(problems: Mapping[str, Iterable[str]], source: str) -> None:
    listed = []
    for kind, names in problems.items():
        if names := sorted(names):
            more = f", ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            listed.append(f"{len(names)} {kind}: {', '.join(names[:_LISTED])}{more}")
    if listed:
        raise UserError(
            f"{source} does not fit the model: {'; '.join(listed)}",
            "were its settings and its base model the same?",
        )
