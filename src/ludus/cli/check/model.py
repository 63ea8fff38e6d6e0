"""`ludus check model`: whether a model is taken, by which paths, and whether it fits; from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.training.config.recipe import Recipe, load_recipe
from ludus.training.config.run import LoraConfig, ModelConfig


@dataclass
class ModelReport:
    """What was found out about a model, and the numbers of it."""

    findings: list[tuple[str, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def say(self, severity: str, text: str, **numbers: Any) -> None:
        self.findings.append((severity, text))
        self.numbers |= numbers


def model_report(
    name: str,
    recipe_path: Path | None,
    *,
    dtype: str | None,
    lora: int | None,
    tokens: int | None,
    memory: Sequence[float],
) -> ModelReport:
    """All that can be told without weights. Options replace what the recipe says."""
    recipe = load_recipe(recipe_path, [f"model.name={name}"]) if recipe_path is not None else None
    model = ModelConfig(name=name) if recipe is None else recipe.model
    model = model.model_copy(
        update={
            "lora": LoraConfig(rank=lora) if lora else model.lora,
            "dtype": dtype or ("bfloat16" if model.dtype == "auto" else model.dtype),
        }
    )
    from transformers.utils import logging as transformers_logging

    from ludus.training.optim.fitting import config_of

    transformers_logging.set_verbosity_error()  # of kernels that are not installed, once for each layer
    report = ModelReport()
    try:
        config, written = config_of(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r} has no config.json that transformers can read: {error}") from None
    _defaults(report, config, written)
    taken = _architecture(report, config)
    _conversations(report, model)
    if taken:
        try:
            _memory(report, config, model, recipe, tokens, memory)
        except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            why = " ".join(str(error).split())
            report.say(
                "error", f"a model of its size cannot be built: {type(error).__name__}: {why:.300}"
            )
    return report


def _defaults(report: ModelReport, config: Any, written: Json) -> None:
    """Warn of sizes that the file leaves to the defaults of its class."""
    text = config.get_text_config()
    given = written.keys() | dict(written.get("text_config") or {}).keys()
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    if not any(given & {name, text.attribute_map.get(name, name)} for name in names):
        report.say(
            "warning",
            "its config.json names neither a width, nor layers, nor a vocabulary: sizes are the defaults of "
            f"{type(text).__name__}",
        )


def _architecture(report: ModelReport, config: Any) -> bool:
    """Whether the architecture is taken: a tiny random model of it is compared with its own forward."""
    import torch

    from ludus.model import decoder_of, use_ludus_attention
    from ludus.model.forest_attention import can_share_prefixes
    from ludus.model.fused_model import unsupported
    from ludus.model.hf_model import auto_class, rows_alone
    from ludus.model.probes import check_positions
    from ludus.model.state_layers import state_layers
    from ludus.model.tiny import tiny_config
    from ludus.training.models.lora import lora_targets

    kind = config.model_type
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny = auto_class(config).from_config(tiny_config(config), dtype=torch.float32).eval()
        use_ludus_attention(tiny)
    except LudusError as error:
        report.say("error", f"{kind} is refused: {error}", taken=False, family=kind)
        return False
    except Exception as error:  # noqa: BLE001 - whatever an architecture raises
        why = f"{type(error).__name__}: {error}"
        report.say("error", f"{kind}: a tiny model of it does not run: {why:.300}", taken=False)
        return False
    report.say(
        "ok",
        f"{type(tiny).__name__} ({kind}) is taken: a tiny random model of it computes packed rows and logits "
        "as its own forward does",
        taken=True,
        family=kind,
    )
    if (alone := rows_alone(tiny)) is not None:
        report.say("warning", f"it is run row by row and without a KV cache, which is slow: {alone}")
    if state_layers(tiny):
        report.say(
            "info",
            "its layers with a state are counted below as the kernels installed here compute them; those "
            "of plain PyTorch keep far more than fast ones (docs/models.md)",
        )
    reason = unsupported(decoder_of(tiny))
    fused = "the fused forward and CUDA graphs" if reason is None else f"its own forward ({reason})"
    report.say("info", f"on a GPU: {fused}", fused=reason is None)
    shares = bool(can_share_prefixes(tiny))
    report.say(
        "info", f"prefixes that rows share: {'computed once' if shares else 'computed in each row'}"
    )
    ends = sorted({one.rpartition(".")[2] for kind in lora_targets(tiny, LoraConfig()) for one in kind})
    report.say("info", f"LoRA: {', '.join(ends)}", lora_targets=ends, shares_prefixes=shares)
    if hasattr(tiny, "get_image_features"):
        try:
            check_positions(tiny)
            seen = "images are tried when its weights are loaded (docs/images.md)"
        except LudusError as error:
            seen = f"it reads text only here: {error}"
        report.say("info", f"it has a vision part: {seen}")
    return True


def _conversations(report: ModelReport, model: ModelConfig) -> None:
    """Format of calls and mode of the chat template, from the tokenizer's files."""
    from ludus.chat import Renderer
    from ludus.chat.recognition import USUAL, format_for, recognised_format
    from ludus.training.models.loading import tokenizer_of

    folder = Path(str(model.name))
    if folder.is_dir() and not any([*folder.glob("*token*"), *folder.glob("vocab*")]):
        report.say(
            "warning", "its format and template are not known: the folder has no tokenizer's files"
        )
        return
    try:
        tokenizer = tokenizer_of(model)
    except (LudusError, OSError, ValueError) as error:
        why = " ".join(str(error).split())
        report.say("warning", f"its format and template are not known: {why:.300}")
        return
    found = recognised_format(tokenizer)
    features = Renderer(tokenizer, format_for(tokenizer, found or USUAL), history="split").features
    how = (
        "as its chat template writes calls"
        if found
        else "its template writes no calls that a format reads"
    )
    tools = "by the template" if features.native_tools else "by the format, in the system prompt"
    report.say(
        "info",
        f"agent.format = {found or USUAL!r}: {how}; tools are listed {tools}",
        format=found or USUAL,
    )
    if features.rewrites:
        report.say(
            "warning",
            f"its template rewrites earlier turns ({', '.join(features.rewrites)}): choose agent.history, "
            '"keep" or "split" (docs/chat_templates.md)',
            rewrites=list(features.rewrites),
        )


def _memory(
    report: ModelReport,
    config: Any,
    model: ModelConfig,
    recipe: Recipe | None,
    tokens: int | None,
    memory: Sequence[float],
) -> None:
    import torch

    from ludus.training.optim.estimate import DEVICES, GIB, Device, Load, model_size, training_memory
    from ludus.training.optim.fitting import EPISODE, loads_of, plans_for

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    loads = [load for _, load in loads_of(recipe)] if recipe is not None else []
    load = max(loads, key=lambda one: one.reference, default=Load())
    if tokens is not None:
        load = Load(tokens, load.trained, load.passes, load.optimizer, load.reference)
    longest = min(recipe.budgets.max_tokens if recipe is not None else EPISODE, load.tokens)
    size = model_size(config, dtype, model.lora)
    whole = training_memory(size, load, DEVICES[-1].gib * GIB)
    what = f"an adapter of {size.adapter / 1e6:.1f}M" if size.adapter else "all of them trained"
    report.say(
        "info",
        f"{size.parameters / 1e9:.2f}B parameters in {model.dtype}, {what}; KV cache "
        f"{size.token_bytes / 1024:.0f} KiB a token",
        size=asdict(size),
    )
    parts = ("weights", "optimizer", "reference", "gradients", "activations", "head")
    shown = ", ".join(f"{name} {getattr(whole, name) / GIB:.1f}" for name in parts)
    report.say(
        "info",
        f"GiB in a training step, {load.tokens} tokens in a pass, nothing computed again: {shown}; "
        f"{whole.peak / GIB:.1f} at the peak",
        step=asdict(whole),
    )
    own = [Device(f"{one:g} GiB", int(one), 0, 0) for one in memory]
    lines: list[dict[str, Any]] = []
    for device in own or DEVICES:
        given = int((memory[own.index(device)] if own else device.gib) * GIB)
        plans = list(plans_for(config, dtype, model.lora, load, longest, given))
        fits = bool(plans) and not plans[0].change
        report.say("info" if fits or not own else "failed", _fit_text(device, plans))
        lines.append(
            {"device": device.name, "fits": fits, "changes": [p.change for p in plans if p.change]}
        )
    report.numbers["devices"] = lines


def _fit_text(device: Any, plans: Sequence[Any]) -> str:
    """What a device can do, in a line."""
    name = device.name if device.name.endswith("GiB") else f"{device.name} ({device.gib} GiB)"
    if not plans:
        return f"{name}: does not fit, with an adapter neither: several GPUs, or a smaller model"
    first = plans[0]
    if first.change:
        ways = "; or ".join(f"{one.change} ({', '.join(_details(device, one))})" for one in plans)
        return f"{name}: does not fit; it does with {ways}"
    return f"{name}: fits, {', '.join(_details(device, first))}"


def _details(device: Any, plan: Any) -> Iterator[str]:
    from ludus.training.optim.estimate import GIB, sampling_speed, training_speed

    layers, again, longest = plan.size.costs.layers, plan.load.checkpointed, plan.longest
    yield f"{plan.memory.peak / GIB:.1f} GiB at the peak of training"
    yield f"{plan.load.tokens} tokens in a pass"
    if again:
        yield f"{again} of {layers} layers computed again"
    rows = 256
    if plan.size.token_bytes:  # layers with a state keep nothing of a token
        rows = plan.cache // (plan.size.token_bytes * longest)
        room = plan.cache // plan.size.token_bytes
        yield f"beside it a cache of up to {room:,} tokens ({rows} episodes of {longest})"
    if device.bandwidth:
        trained = training_speed(plan.size, device, recomputed=again / max(1, layers))
        running = min(256, max(1, rows))
        sampled = sampling_speed(plan.size, device, running, longest // 2)
        yield f"about {trained:,.0f} tokens/s in training and {sampled:,.0f} in sampling ({running} at once)"
