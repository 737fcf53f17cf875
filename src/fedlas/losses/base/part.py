"""Base classes of losses and of their parts: hyperparameters in `repr` and `state_dict`, and float64 state."""

import warnings
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedlas.catalog import keywords
from fedlas.losses.base.input_checks import is_eager_on_cpu, is_transformed

Exact = TypeVar("Exact", bound="AbstractExact")


class AbstractPart(nn.Module, ABC):
    """A module that shows its hyperparameters in its `repr` and saves them in its `state_dict`.

    Hyperparameters are keywords of the constructor with an attribute of the same name. They are saved in the metadata
    of `state_dict`; tensor-only formats (safetensors) do not store this metadata. Loading the state of another class
    raises; loading a state with other hyperparameters warns.
    """

    not_hyperparameters: ClassVar[frozenset[str]] = frozenset()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters by their keywords."""
        names = [name for name in keywords(type(self)) if name not in self.not_hyperparameters]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def extra_repr(self) -> str:
        """Show the hyperparameters."""
        return ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters.items())

    @property
    def is_transformed(self) -> bool:
        """Whether this call is inside a transform of `torch.func`, whose tensors are invalid outside of it."""
        return is_transformed()

    def is_eager_on_cpu(self, x: Tensor) -> bool:
        """Return whether values can be read without synchronisation and the overhead per operator dominates."""
        return is_eager_on_cpu(x)

    def check_update(self) -> None:
        """Raise if the state cannot be updated in place."""
        if self.is_transformed:
            raise RuntimeError(
                f"{type(self).__name__} updates its state in a training step, which torch.func transforms cannot do; "
                "call loss.eval() first"
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            plain = {
                name: v for name, v in self.hyperparameters.items() if v is None or isinstance(v, int | float | str)
            }
            metadata |= {"class": type(self).__name__, "hyperparameters": plain}

    def _load_from_state_dict(  # noqa: PLR0917 (the signature of nn.Module)
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        class_name, saved_class_name = type(self).__name__, local_metadata.get("class", type(self).__name__)
        if class_name != saved_class_name:
            error_msgs.append(
                f"{prefix[:-1] or 'this module'} is a {class_name}, but the state was saved by a {saved_class_name}"
            )
            return
        saved, hyperparameters = local_metadata.get("hyperparameters", {}), self.hyperparameters
        different = [
            f"{name}={saved[name]!r} (here {hyperparameters[name]!r})"
            for name in hyperparameters
            if hyperparameters[name] != saved.get(name, hyperparameters[name])
        ]
        if different:
            warnings.warn(
                f"the loaded state of {class_name} belongs to other hyperparameters: {', '.join(different)}",
                UserWarning,
                stacklevel=2,
            )


class AbstractExact(AbstractPart):
    """A module whose float64 buffers stay float64 when the module is cast to a lower precision.

    In bfloat16, updates of a running average with a small weight would be rounded to zero.
    """

    def _apply(self: Exact, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exact:
        exact = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float64}
        for name, buffer in exact.items():  # fn moves a float32 copy, which every device supports
            self._buffers[name] = buffer.float()
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            dtype = torch.float32 if moved.device.type == "mps" else torch.float64
            self._buffers[name] = moved.to(dtype) if buffer.is_meta else buffer.to(moved.device, dtype)
        return self
