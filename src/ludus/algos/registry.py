"""Algorithms by name: what a recipe says, and the functions that it stands for.

A name is a short one from the tables of `specs.py`, or a reference (`module:function`, `file.py:function`) to a
function of one's own. Options are the function's keyword arguments: their names, types, ranges and defaults
are read from its signature, and what does not fit is refused by name. What a user's own function returns is
checked at each call; what comes with Ludus is tested instead, and called as it is.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import create_model
from torch import Tensor

from ludus.algos.advantage_inputs import AdvantageInputs, Advantages, Estimator, Need, needs_of
from ludus.algos.losses import Aggregation, Correction, Divergence, LossInputs, PolicyLoss, corrected, k3
from ludus.algos.specs import (
    AGGREGATIONS,
    ALGORITHMS,
    CORRECTIONS,
    DIVERGENCES,
    ESTIMATORS,
    LOSSES,
    AlgorithmSpec,
    Options,
)
from ludus.core.config import Config
from ludus.core.failures import ConfigError, LudusError
from ludus.core.registry import Registry


def load_estimator(name: str, options: Options | None = None) -> Estimator:
    """An advantage estimator with its options bound."""
    bound = _bound(ESTIMATORS, name, options)
    needs_critic = Need.CRITIC in needs_of(ESTIMATORS.load(name))
    estimator: Estimator = _checked(ESTIMATORS, name, bound, partial(_check_advantages, needs_critic))
    return estimator


def load_loss(name: str, options: Options | None = None) -> PolicyLoss:
    """A policy loss with its options bound."""
    loss: PolicyLoss = _checked(LOSSES, name, _bound(LOSSES, name, options), _check_loss)
    return loss


def load_aggregation(name: str, options: Options | None = None) -> Aggregation:
    """An aggregation with its options bound."""
    aggregation: Aggregation = _checked(
        AGGREGATIONS, name, _bound(AGGREGATIONS, name, options), _check_aggregation
    )
    return aggregation


def load_correction(name: str, options: Options | None = None) -> Correction:
    """An importance correction with its options bound."""
    correction: Correction = _checked(
        CORRECTIONS, name, _bound(CORRECTIONS, name, options), _check_correction
    )
    return correction


def load_divergence(name: str) -> Divergence:
    """An estimator of the divergence from a reference."""
    divergence: Divergence = _bound(DIVERGENCES, name, None)
    return divergence


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Algorithm:
    """Everything that an update needs to know, ready to be called."""

    estimate: Estimator
    loss: PolicyLoss
    weigh: Aggregation
    needs: frozenset[Need]
    divergence: Divergence = k3
    """How the KL divergence from a reference is estimated."""


def load_algorithm(
    name: str,
    options: Options | None = None,
    *,
    loss: str | None = None,
    loss_options: Options | None = None,
    aggregation: str | None = None,
    aggregation_options: Options | None = None,
    correction: str | None = None,
    correction_options: Options | None = None,
    divergence: str = "k3",
) -> Algorithm:
    """The algorithm of that name; `options` are its estimator's, and what is left out is as usual for it."""
    plan = ALGORITHMS.get(name)
    if plan is None:
        if ":" not in name:
            Registry("algorithm", dict.fromkeys(ALGORITHMS, "")).load(name)  # says what is known
        plan = AlgorithmSpec(name)
    usual = plan.loss_options if loss in (None, plan.loss) else {}
    policy_loss = load_loss(loss or plan.loss, {**usual, **(loss_options or {})})
    if correction is not None:
        policy_loss = corrected(policy_loss, load_correction(correction, correction_options))
    elif correction_options:
        raise ConfigError("there are options for an importance correction, but no correction is named")
    return Algorithm(
        estimate=load_estimator(plan.estimator, options),
        loss=policy_loss,
        weigh=load_aggregation(aggregation or plan.aggregation, aggregation_options),
        needs=needs_of(ESTIMATORS.load(plan.estimator)),
        divergence=load_divergence(divergence),
    )


def _checked(
    registry: Registry, name: str, function: Callable[..., Any], check: Callable[..., None]
) -> Callable[..., Any]:
    """The function; what a user's own one returns is checked at each call."""
    if ":" not in name:
        return function
    who = f"the {registry.kind} {name!r}"

    def checked(*inputs: Any) -> Any:
        found = called(who, function, *inputs)
        check(who, found, *inputs)
        return found

    return checked


def _bound(registry: Registry, name: str, options: Options | None) -> Any:
    function: Callable[..., Any] = registry.load(name)
    if not inspect.isfunction(function):
        raise ConfigError(f"the {registry.kind} {name!r} must be a function; it is {function!r:.80}")
    _check_signature(function, registry.kind, name, options or {})
    parsed = options_of(function).parse(options or {}, f"the options of the {registry.kind} {name!r}")
    chosen = {key: getattr(parsed, key) for key in type(parsed).model_fields}
    return partial(function, **chosen) if chosen else function


_TAKES = {
    "estimator": ("inputs",),
    "loss": ("inputs",),
    "aggregation": ("trajectory_T", "trained_T"),
    "correction": ("inputs",),
    "divergence": ("logprobs_A", "reference_A"),
}
"""Positional arguments of each kind of function. All other parameters are options."""


def _check_signature(function: Callable[..., Any], kind: str, name: str, options: Options) -> None:
    """Options are keyword-only, so that they cannot be taken for what is computed from."""
    takes = _TAKES[kind]
    placed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    further = placed[len(takes) :]
    is_meant = any(one.name in options or one.default is one.empty for one in further)
    if len(placed) < len(takes) or is_meant:
        shown = ", ".join((*takes, *(["*"] if further else []), *(str(one) for one in further)))
        raise ConfigError(
            f"the {kind} {name!r} is called with {' and '.join(takes)}; its options stand behind a '*': "
            f"def {function.__name__}({shown})"
        )


@cache
def options_of(function: Callable[..., Any]) -> type[Config]:
    """The keyword arguments of a function as a table of settings."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return create_model(function.__name__, __base__=Config, **fields)


_NOT_THEIRS = (
    Path(__file__).parents[1],
    Path(torch.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)
"""Where Ludus, torch and other libraries are: what was raised there was caused elsewhere."""


def called(who: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function; an error names it, the exception, and the user's lines.

    Running out of memory is no mistake of theirs, and the trainer has an answer to it.
    """
    try:
        return function(*arguments)
    except (LudusError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{who} raised {what}{_places(error)}") from error


def _places(error: Exception) -> str:
    """Frames of an error as `file.py:12 in name`, from the call to the cause."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _NOT_THEIRS)
    ]
    return f" ({', '.join(frames)})" if frames else ""


def _check_advantages(needs_critic: bool, who: str, found: Any, inputs: AdvantageInputs) -> None:
    if not isinstance(found, Advantages):
        raise ConfigError(
            f"{who} returned {_described(found)}; an Advantages is wanted: inputs.broadcast(advantages_N), "
            "inputs.broadcast_turns(advantages_U) or Advantages(advantages_T)"
        )
    tokens = len(inputs.trajectory_T)
    _check(found.advantages_T, tokens, f"{who} returned advantages_T", "one for each token")
    if found.returns_T is not None:
        _check(found.returns_T, tokens, f"{who} returned returns_T", "one for each token")
    elif needs_critic:
        raise ConfigError(
            f"{who} needs a critic and returned no returns_T, from which the critic would learn: "
            "Advantages(advantages_T, returns_T)"
        )


def _check_loss(who: str, found: Any, inputs: LossInputs) -> None:
    """A loss and metrics for each token are wanted. Whether they are finite, the gradient says."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ConfigError(f"{who} returned {_described(found)}; (loss_A, metrics_A) is wanted")
    loss_A, metrics = found
    size, wanted = len(inputs.logprobs_A), "one for each trained token, not their mean"
    _check(loss_A, size, f"{who} returned a loss", wanted, is_finite=False)
    for metric, value_A in metrics.items():
        _check(value_A, size, f"{who} returned the metric {metric!r}", wanted, is_finite=False)


def _check_aggregation(who: str, found: Any, trajectory_T: Tensor, trained_T: Tensor) -> None:
    _check(found, len(trained_T), f"{who} returned weights", "one for each token")


def _check_correction(who: str, found: Any, inputs: LossInputs) -> None:
    _check(found, len(inputs.logprobs_A), f"{who} returned weights", "one for each trained token")


def _check(found: Any, size: int, who: str, wanted: str, *, is_finite: bool = True) -> None:
    fits = isinstance(found, Tensor) and found.is_floating_point() and found.shape == (size,)
    if not fits:
        raise ConfigError(f"{who} as {_described(found)}; {wanted} is wanted: floats of shape ({size},)")
    if is_finite and not bool(torch.isfinite(found).all()):
        bad = int((~torch.isfinite(found)).sum())
        raise ConfigError(
            f"{who} of which {bad} of {size} are not finite: look for a division by 0, as by the deviation "
            "of rewards that are all equal"
        )


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')} and shape {tuple(found.shape)}"
    return f"{type(found).__name__} {found!r:.60}"
