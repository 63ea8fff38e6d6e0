"""LoRA through peft: small matrices beside a model's own, never merged into them.

The adapted module is sampled and trained as it stands; the engine runs its layers, adapters and all. Only the
adapter's weights are trained and saved. They are float32 whatever the base is, so that small updates are not
lost, and an optimizer needs no second copy of them.

A reference needs no second copy of the base either: it is the same module with the adapter off, or with the
adapter's weights swapped for those that it had before. Swapping exchanges the parameters' storage, not what is
in it, and is undone at once: a graph that waits for its backward pass finds what it was made with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.engine import decoder_of, hidden_states, sampling_mode
from ludus.engine.attention import CONTEXT
from ludus.engine.hf_model import unwrapped
from ludus.training.adapter_files import (
    WEIGHTS,
    base_of,
    check_base,
    check_complete,
    check_settings,
    keeping_the_base,
    read_weights,
    saved_name,
    splits_its_base,
    write_base,
)
from ludus.training.fingerprint import fingerprint
from ludus.training.recipe import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel

RANK, ALPHA = 16, 32.0
"""Of a new adapter, where a recipe leaves them open."""


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is trained through an adapter."""
    return hasattr(model, "peft_config")


def add_adapter(model: nn.Module, config: LoraConfig, base: str, seed: int) -> nn.Module:
    """The model with a new adapter, which changes nothing yet. `base` is what the model is loaded by."""
    peft = require_peft()
    settings = peft.LoraConfig(
        r=config.rank or RANK,
        lora_alpha=config.alpha or ALPHA,
        lora_dropout=config.dropout,
        target_modules=_targets(model, config),
        task_type="CAUSAL_LM",
    )
    print_of_base = fingerprint(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: Any = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora: peft cannot adapt {base!r}: {error}") from error
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def load_adapter(model: nn.Module, folder: Path, config: LoraConfig | None) -> nn.Module:
    """The base model with the adapter of a folder, ready to be trained further."""
    peft = require_peft()
    weights = read_weights(folder)
    print_of_base = fingerprint(model)
    check_base(print_of_base, folder)
    try:
        settings = peft.LoraConfig.from_pretrained(str(folder))
        check_settings(settings, folder)
        # asked for by a recipe or not at all: an adapter from elsewhere often has some
        settings.lora_dropout = config.dropout if config is not None else 0.0
        with keeping_the_base(weights, model, folder):
            adapted: Any = peft.PeftModel.from_pretrained(
                model, str(folder), config=settings, is_trainable=True
            )
            loaded = peft.set_peft_model_state_dict(adapted, weights)  # again, to be told what is amiss
    except ConfigError:
        raise
    except Exception as error:  # peft passes on whatever its parts raise
        raise ConfigError(
            f"the adapter in {folder} does not fit its base {base_of(folder)!r}: "
            f"{type(error).__name__}: {str(error).strip():.300}"
        ) from error
    missing, foreign = (
        sorted(name for name in names if "lora_" in name)
        for names in (loaded.missing_keys, loaded.unexpected_keys)
    )
    check_complete(missing, foreign, folder)
    if config is not None:
        _compare(adapted, config, folder)
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def _compare(adapted: Any, config: LoraConfig, folder: Path) -> None:
    """Refuse a recipe that says something else about an adapter than it is."""
    settings = adapted.peft_config["default"]
    layers = {n.rpartition(".lora_")[0] for n, _ in _adapter_parameters(adapted)}
    found = (settings.r, settings.lora_alpha, {name.rpartition(".")[2] for name in layers})
    named = config.targets != "all-linear"  # which says nothing of a saved one
    targets = {target.rpartition(".")[2] for target in config.targets} if named else found[2]
    if (config.rank or found[0], config.alpha or found[1], targets) != found:
        raise ConfigError(
            f"the adapter in {folder} has rank {found[0]}, alpha {found[1]:g} and the targets "
            f"{', '.join(sorted(found[2]))}, which model.lora does not say: leave them out to take the adapter "
            "as it is"
        )


def save_adapter(folder: Path, model: nn.Module) -> None:
    """Write an adapter as peft reads it."""
    adapted: Any = model
    settings = adapted.peft_config["default"]
    state = require_peft().get_peft_model_state_dict(adapted, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    write_base(adapted.base_fingerprint, folder)
    settings.inference_mode = (
        True  # as peft leaves it on disk: a plain load is for use, not for training
    )
    try:
        settings.save_pretrained(str(folder))
    finally:
        settings.inference_mode = False


class AdapterReference(nn.Module):
    """The policy's module as it was at some time, to be read and never to be trained.

    It stands in for a model wherever log-probabilities are computed: its decoder is the policy's, run with
    the adapter that it stands for. Without `weights`, that is no adapter at all.
    """

    def __init__(
        self, policy: PeftModel, start: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None
    ) -> None:
        """`start` is what `state_dict` gives of the adapter: the weights to return to."""
        super().__init__()
        self.policy: Any = policy
        self.decoder = _Standing(policy, weights)
        self._start = dict(start)

    @property
    def config(self) -> Any:
        return unwrapped(self.policy).config

    def get_decoder(self) -> nn.Module:
        """What `hidden_states` runs."""
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return unwrapped(self.policy).get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        head = unwrapped(self.policy).get_output_embeddings()
        return head if type(head) is nn.Linear else _StandingHead(self.policy, self.decoder.weights)

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Stand for the policy's adapter as it is now, or for these weights of it."""
        self.decoder.weights = {
            name: (parameter if weights is None else weights[name]).to(parameter.device, copy=True)
            for name, parameter in _adapter_parameters(self.policy)
        }

    def state_dict(self, **options: Any) -> Any:
        """The policy's, with the adapter as it was at the start."""
        return {**self.policy.state_dict(**options), **self._start}


class _Standing(nn.Module):
    """A decoder that is another model's, with that model's adapter changed while it runs."""

    def __init__(self, policy: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # not a part of this module: it is listed once, by its owner
        self.weights = weights

    def get_input_embeddings(self) -> Any:
        return unwrapped(self.__dict__["policy"]).get_input_embeddings()

    def forward(self, input_ids: Tensor, position_ids: Tensor, **others: Any) -> SimpleNamespace:
        """As `hidden_states` calls it; what comes back never has a gradient."""
        policy = self.__dict__["policy"]
        with torch.no_grad(), sampling_mode(policy), _changed(policy, self.weights):
            states_TD = hidden_states(policy, input_ids[0], position_ids, others[CONTEXT])
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


def adapter_reference(model: nn.Module, folder: Path, bare: bool) -> AdapterReference:
    """A model as it was when its adapter was saved in a folder, or with no adapter at all (`bare`)."""
    adapted: Any = model
    settings = adapted.peft_config["default"]
    if bare and splits_its_base(settings):
        how = settings.init_lora_weights if isinstance(settings.init_lora_weights, str) else "KaSA"
        raise ConfigError(
            f'model.lora.reference = "base": this adapter began with {how}, and the '
            'base without it is not the model it was; use "start"'
        )
    saved = read_weights(folder)
    start = {
        name: saved[saved_name(name)].to(parameter.device, parameter.dtype)
        for name, parameter in _adapter_parameters(adapted)
    }
    zeros = ("lora_B", "lora_embedding_A")  # in a new adapter
    untrained = not any(bool(tensor.any()) for n, tensor in start.items() if any(z in n for z in zeros))
    return AdapterReference(adapted, start, None if bare or untrained else start)


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
    own = [(parameter, parameter.data, weights[name]) for name, parameter in _adapter_parameters(policy)]
    for parameter, _, other in own:
        parameter.data = other
    try:
        yield
    finally:
        for parameter, data, _ in own:
            parameter.data = data


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if "lora_" in name)


def _targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """The last parts of the layers' names. The head and the embeddings are left as they are."""
    from transformers.pytorch_utils import Conv1D

    # by what they compute: a router of experts may be a linear layer by name and give something else
    products = (nn.Linear.forward, Conv1D.forward)
    names = {name for name, m in decoder_of(model).named_modules() if type(m).forward in products}
    known = sorted({name.rpartition(".")[2] for name in names})
    if config.targets == "all-linear":
        return known
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"model.lora.targets names {target!r}, and the decoder has no linear layer of that name; "
                f"it has {', '.join(known)}"
            )
    return sorted(config.targets)


def _checked(model: nn.Module) -> nn.Module:
    """The adapted model, its base out of training's reach."""
    others = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    if others:
        raise ConfigError(
            f"the adapter would train {others[0]} and {len(others) - 1} more weights of the base itself "
            "(biases, or modules_to_save); Ludus keeps and saves low-rank matrices alone"
        )
    return model


def require_peft() -> Any:
    """The package; an error that names the extra where it is missing."""
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "lora", "model.lora") from None
    return peft
