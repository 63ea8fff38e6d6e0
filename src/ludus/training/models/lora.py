"""LoRA through peft: small matrices beside a model's own, never merged into them.

The adapted module is sampled and trained as it stands; the engine runs its layers, adapters and all. Only the
adapter's weights are trained and saved. They are float32 whatever the base is, so that small updates are not
lost, and an optimizer needs no second copy of them.

A reference needs no second copy of the base either: it is the same module with the adapter off, or with the
adapter's weights swapped for those that it had before. Swapping exchanges the parameters' storage, not what is
in it, and is undone at once: a graph that waits for its backward pass finds what it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.engine import decoder_of, hidden_states, sampling_mode, unwrapped
from ludus.engine.attention import CONTEXT
from ludus.training.config.model import LoraConfig
from ludus.training.optim.sharding import ShardedModel, local, shard_of, sharded_like, whole_of

if TYPE_CHECKING:
    from peft import PeftModel
import hashlib
import json
from collections.abc import Sequence

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
    """The same for a policy that is sharded: every rank holds its part of the adapter that it stands for."""

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
        named = list(_adapter_parameters(self.policy.model))
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
            for name, p in _adapter_parameters(self.policy.model)
        }

    def wholes(self) -> dict[str, Tensor] | None:
        """The adapter that it stands for, gathered; all ranks call it."""
        if self._parts is None:
            return None
        named = _adapter_parameters(self.policy.model)
        return {name: whole_of(sharded_like(self._parts[name], p)).cpu() for name, p in named}


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
        return known if _is_alone(model) else _within_decoder(model, names)
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"model.lora.targets names {target!r}, and the decoder has no linear layer of that name; "
                f"it has {', '.join(known)}"
            )
    if _is_alone(model):
        return sorted(config.targets)
    chosen = {n for n in names if any(n == t or n.endswith(f".{t}") for t in config.targets)}
    return _within_decoder(model, chosen)


def _is_alone(model: nn.Module) -> bool:
    """Whether no other part, such as a vision tower, could have layers of the decoder's names."""
    return not hasattr(unwrapped(model), "get_image_features")


def _within_decoder(model: nn.Module, names: set[str]) -> list[str]:
    """The whole names of a decoder's layers."""
    decoder = decoder_of(model)
    prefix = next(name for name, module in unwrapped(model).named_modules() if module is decoder)
    return sorted(f"{prefix}.{name}" for name in names)


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


# Adapter folders. peft fills missing weights with random numbers, loads weights into the base that no
# checkpoint would keep, and takes whatever a configuration asks for: what Ludus cannot sample, train or save is
# refused here.

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls them."""

_BASE = "base.json"
"""What we write beside them: which weights the adapter was trained beside."""

_SPLITTING = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Ways to begin in which an adapter changes the base: the base without it is not the model."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a whole model."""
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """What the model is loaded by that an adapter was trained on."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / CONFIG} is not an adapter's ({type(error).__name__}: {error})"
        ) from None
    if kind != "LORA":
        raise ConfigError(f"{folder} holds an adapter of the kind {kind}; Ludus trains LoRA adapters")
    if not isinstance(base, str):
        raise ConfigError(
            f"{folder / CONFIG} does not say which model its adapter is for: set base_model_name_or_path"
        )
    if is_adapter(base):
        raise ConfigError(
            f"the adapter in {folder} is for {base!r}, which is an adapter itself: merge that one into its "
            "base first (peft's merge_and_unload), and name the folder with the merged model"
        )
    return base


def revision_of(folder: Path) -> str | None:
    """Which version of its base a hub is asked for."""
    revision = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("revision")
    return revision if isinstance(revision, str) and revision else None


def write_base(fingerprint: str, folder: Path) -> None:
    """Note which weights an adapter belongs to."""
    (folder / _BASE).write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")


def check_base(fingerprint: str, folder: Path) -> None:
    """Refuse other weights than an adapter was trained beside, where that is noted."""
    try:
        noted = json.loads((folder / _BASE).read_text(encoding="utf-8"))["fingerprint"]
    except FileNotFoundError:
        return  # others do not note it
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _BASE} cannot be read ({type(error).__name__}: {error})") from None
    if noted != fingerprint:
        raise ConfigError(
            f"the adapter in {folder} was trained beside other weights than {base_of(folder)!r} has now: put "
            f"those back, or set base_model_name_or_path in {CONFIG}; to use it with these all the same, "
            f"remove {_BASE}"
        )


def check_settings(settings: Any, folder: Path) -> None:
    """Refuse what a configuration asks for and Ludus does not do."""
    if getattr(settings, "alora_invocation_tokens", None):
        raise ConfigError(
            f"the adapter in {folder} wakes up at certain tokens (alora_invocation_tokens), which Ludus does "
            "not know"
        )
    if getattr(settings, "layer_replication", None):
        raise ConfigError(
            f"the adapter in {folder} repeats layers (layer_replication), which Ludus does not"
        )
    if _beginning(settings).startswith("pissa_niter"):
        raise ConfigError(
            f"the adapter in {folder} begins with {settings.init_lora_weights}, which peft draws anew whenever "
            "it is loaded: save it as a plain one first (peft's path_initial_model_for_weight_conversion)"
        )


def splits_its_base(settings: Any) -> bool:
    """Whether the model without its adapter is not the model that the adapter was made for."""
    return _beginning(settings).startswith(_SPLITTING) or bool(getattr(settings, "kasa_config", None))


def _beginning(settings: Any) -> str:
    """How its weights begin; peft does not mind the case."""
    return str(settings.init_lora_weights).lower()


def check_weights(folder: Path) -> None:
    """Refuse a folder that says what an adapter is, and does not have it."""
    if not any((folder / name).is_file() for name in (WEIGHTS, "adapter_model.bin")):
        raise ConfigError(
            f"{folder} has an {CONFIG} and no {WEIGHTS}: the adapter's weights are missing"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that peft gives them in a file."""
    from peft.utils import load_peft_weights

    check_weights(folder)
    try:
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    except Exception as error:
        raise ConfigError(
            f"the adapter's weights in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return weights


@contextmanager
def keeping_the_base(weights: Mapping[str, Tensor], model: nn.Module, folder: Path) -> Iterator[None]:
    """Refuse weights of the base itself, unless they are those that it has: they would not be saved again.

    peft loads them, and an adapter may have them in a coarser format: what the base had comes back.
    """
    own = model.state_dict()
    coarser: list[tuple[Tensor, Tensor]] = []
    for name, tensor in weights.items():
        if "lora_" in name:
            continue
        known = own.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        if known is None or not _is_same(known.cpu(), tensor):
            raise ConfigError(
                f"the adapter's weights in {folder} have {name}, which is no part of an adapter and not what "
                "the base has; Ludus keeps and saves low-rank matrices alone"
            )
        if tensor.dtype != known.dtype:
            coarser.append((known, known.clone()))
    yield
    for known, value in coarser:
        known.copy_(value)


def _is_same(known: Tensor, saved: Tensor) -> bool:
    """Whether these are the same numbers, in the finer or in the coarser of the two formats."""
    return torch.equal(known, saved.to(known.dtype)) or torch.equal(known.to(saved.dtype), saved)


def check_complete(missing: Sequence[str], foreign: Sequence[str], folder: Path) -> None:
    """Refuse a file that has not just the weights that its configuration asks for."""
    if missing:
        raise ConfigError(
            f"the adapter's weights in {folder} lack {len(missing)} of those that its {CONFIG} asks for, such "
            f"as {missing[0]}; they would be random numbers. Are both files of one adapter?"
        )
    if foreign:
        raise ConfigError(
            f"the adapter's weights in {folder} have {len(foreign)} that its {CONFIG} does not ask for, such "
            f"as {foreign[0]}; they would be ignored. Are both files of one adapter?"
        )


def saved_name(name: str) -> str:
    """What peft calls a parameter in a file: without the adapter's own name."""
    bare = name.replace(".default.", ".").removesuffix(".default")
    return bare.removesuffix(".weight") if "lora_magnitude_vector" in bare else bare


_PLACES = 256
"""How many numbers of each tensor are looked at."""


def fingerprint(model: nn.Module) -> str:
    """The same for the same weights, in whatever format they were loaded; another one after training.

    Names are left out: they change with the versions of the library that loads a model.
    """
    parts = sorted(map(_digest, model.state_dict().values()))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()
    step = max(1, len(flat) // _PLACES) | 1  # odd, so that not all places are in one column
    seen = flat[::step].to("cpu", torch.bfloat16)
    shape = str(tuple(tensor.shape)).encode()
    return hashlib.sha256(shape + seen.view(torch.int16).numpy().tobytes()).hexdigest()
