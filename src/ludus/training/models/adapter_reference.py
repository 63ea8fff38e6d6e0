"""References of an adapted model: the policy's own module as it was at some time.

A reference needs no second copy of the base: it is the same module with the adapter off, or with the adapter's
weights swapped for those that it had before. Swapping exchanges the parameters' storage, not what is in it, and
is undone at once: a graph that waits for its backward pass finds what it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.model import hidden_states, sampling_mode, unwrapped
from ludus.model.forward import CONTEXT
from ludus.training.models.adapter_folder import read_weights, saved_name, splits_its_base
from ludus.training.models.lora import adapter_parameters
from ludus.training.optim.sharding import ShardedModel, local, module_of, shard_of, sharded_like

if TYPE_CHECKING:
    from peft import PeftModel


class AdapterReference(nn.Module):
    """The policy's module as it was at some time, to be read and never to be trained.

    It stands in for a model wherever log-probabilities are computed: its decoder is the policy's, run with
    the adapter that it stands for. Without `weights`, that is no adapter at all.
    """

    def __init__(self, policy: PeftModel, weights: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.policy: Any = policy
        self.decoder = _Standing(policy, weights)

    @property
    def config(self) -> Any:
        return unwrapped(self.policy).config

    def get_decoder(self) -> nn.Module:
        """The decoder that `hidden_states` runs."""
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return unwrapped(self.policy).get_input_embeddings()

    @property
    def sees_by(self) -> Any:
        """The model whose vision part it has: adapters are put into decoders alone."""
        return unwrapped(self.policy)

    def get_output_embeddings(self) -> Any:
        head = unwrapped(self.policy).get_output_embeddings()
        return head if type(head) is nn.Linear else _StandingHead(self.policy, self.decoder.weights)

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Stand for the policy's adapter as it is now, or for these weights of it."""
        self.decoder.weights = {
            name: (parameter if weights is None else weights[name]).to(parameter.device, copy=True)
            for name, parameter in adapter_parameters(self.policy)
        }


class _Standing(nn.Module):
    """A decoder that is another model's, with that model's adapter changed while it runs."""

    def __init__(self, policy: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # not a part of this module: it is listed once, by its owner
        self.weights = weights

    def get_input_embeddings(self) -> Any:
        return unwrapped(self.__dict__["policy"]).get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> SimpleNamespace:
        """As `hidden_states` calls it; what comes back never has a gradient."""
        policy, given = self.__dict__["policy"], input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None and position_ids is not None
        ids_T = given[0] if inputs_embeds is None else position_ids[0]  # not read beside embeddings
        embedded_TD = None if inputs_embeds is None else inputs_embeds[0]
        with torch.no_grad(), sampling_mode(policy), _changed(policy, self.weights):
            states_TD = hidden_states(policy, ids_T, position_ids, others[CONTEXT], embedded_TD)
        return SimpleNamespace(last_hidden_state=states_TD[None])


class _StandingHead(nn.Module):
    """An adapted head, with its adapter changed while it runs."""

    def __init__(self, policy: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.__dict__["policy"] = policy
        self.weights = weights

    def forward(self, hidden: Tensor) -> Tensor:
        policy = self.__dict__["policy"]
        with torch.no_grad(), sampling_mode(policy), _changed(policy, self.weights):
            logits: Tensor = unwrapped(policy).get_output_embeddings()(hidden)
        return logits


class ShardedAdapterReference(nn.Module):
    """An adapter reference of a sharded policy: every rank holds its part of the adapter."""

    def __init__(self, policy: ShardedModel, weights: Mapping[str, Tensor] | None) -> None:
        """`weights` are whole tensors by name; without them it is no adapter at all."""
        super().__init__()
        self.policy = policy
        self.group = policy.group
        self._parts: dict[str, Tensor] | None = None
        if weights is not None:
            self.follow(weights)

    def get_base_model(self) -> Any:
        return unwrapped(self.policy.model)

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(the policy, *args) with the adapter that this stands for; never with a gradient."""
        with torch.no_grad(), sampling_mode(self.policy), self._changed():
            return self.policy.compute(function, *args)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        if self._parts is None:
            with _changed(self.policy.model, None):
                yield
            return
        named = list(adapter_parameters(self.policy.model))
        kept = [local(parameter).clone() for _, parameter in named]
        for name, parameter in named:
            local(parameter).copy_(self._parts[name])
        try:
            yield
        finally:
            for (_, parameter), own in zip(named, kept, strict=True):
                local(parameter).copy_(own)

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Stand for the policy's adapter as it is now, or for these weights of it, which are whole."""
        self._parts = {
            name: (local(p) if weights is None else shard_of(weights[name], p)).to(p.device, copy=True)
            for name, p in adapter_parameters(self.policy.model)
        }

    def tensors(self) -> dict[str, Tensor] | None:
        """The adapter that it stands for, of which every rank has its part; None for no adapter at all."""
        if self._parts is None:
            return None
        named = adapter_parameters(self.policy.model)
        return {name: sharded_like(self._parts[name], p) for name, p in named}


def adapter_reference(
    model: nn.Module, folder: Path, bare: bool
) -> AdapterReference | ShardedAdapterReference:
    """A model as it was when its adapter was saved in a folder, or with no adapter at all (`bare`)."""
    adapted: Any = module_of(model)
    settings = adapted.peft_config["default"]
    if bare and splits_its_base(settings):
        how = settings.init_lora_weights if isinstance(settings.init_lora_weights, str) else "KaSA"
        raise ConfigError(
            f'model.lora.reference = "base": this adapter began with {how}, and the '
            'base without it is not the model it was; use "start"'
        )
    start = saved_adapter(model, folder)
    zeros = ("lora_B", "lora_embedding_A")  # in a new adapter
    untrained = not any(bool(tensor.any()) for n, tensor in start.items() if any(z in n for z in zeros))
    weights = None if bare or untrained else start
    if isinstance(model, ShardedModel):
        return ShardedAdapterReference(model, weights)
    return AdapterReference(adapted, weights)


def saved_adapter(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The weights of a saved adapter by the names of a model's parameters, whole."""
    saved = read_weights(folder)
    return {
        name: saved[saved_name(name)].to(parameter.device, parameter.dtype)
        for name, parameter in adapter_parameters(module_of(model))
    }


@contextmanager
def _changed(policy: Any, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The policy with these weights in its adapter, or with its adapter off."""
    if weights is None:
        policy.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            policy.base_model.enable_adapter_layers()
        return
    own = [(parameter, parameter.data, weights[name]) for name, parameter in adapter_parameters(policy)]
    for parameter, _, other in own:
        parameter.data = other
    try:
        yield
    finally:
        for parameter, data, _ in own:
            parameter.data = data
