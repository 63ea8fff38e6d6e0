"""Algorithms by name: what a recipe says, and the functions that it stands for.

A name is a short one from the tables below, or a reference (`module:function`, `file.py:function`) to a
function of one's own. Options are the function's keyword arguments: their names, types, ranges and defaults
are read from its signature, and what does not fit is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, get_type_hints

from pydantic import create_model

from ludus.algos.aggregate import Aggregation
from ludus.algos.checking import (
    checked_aggregation,
    checked_correction,
    checked_estimator,
    checked_loss,
)
from ludus.algos.credit import Estimator, Need, needs_of
from ludus.algos.importance import Correction, corrected
from ludus.algos.kl import Divergence
from ludus.algos.losses import PolicyLoss
from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.registry import Registry

ESTIMATORS = Registry(
    "estimator",
    {
        "grpo": "ludus.algos.grpo:grpo",
        "dr_grpo": "ludus.algos.dr_grpo:dr_grpo",
        "rloo": "ludus.algos.rloo:rloo",
        "reinforce": "ludus.algos.reinforce:reinforce",
        "reinforce_pp": "ludus.algos.reinforce_pp:reinforce_pp",
        "reinforce_pp_baseline": "ludus.algos.reinforce_pp_baseline:reinforce_pp_baseline",
        "gae": "ludus.algos.gae:gae",
        "turn_grpo": "ludus.algos.turn_grpo:turn_grpo",
        "gigpo": "ludus.algos.gigpo:gigpo",
    },
)
LOSSES = Registry(
    "loss",
    {
        "policy_gradient": "ludus.algos.losses:policy_gradient",
        "clipped": "ludus.algos.losses:clipped_surrogate",
        "dual_clip": "ludus.algos.losses:dual_clip",
        "gspo": "ludus.algos.losses:gspo",
        "cispo": "ludus.algos.losses:cispo",
    },
)
AGGREGATIONS = Registry(
    "aggregation",
    {
        "token": "ludus.algos.aggregate:by_token",
        "sequence": "ludus.algos.aggregate:by_sequence",
        "sequence_sum": "ludus.algos.aggregate:by_sequence_sum",
        "length": "ludus.algos.aggregate:by_length",
    },
)
CORRECTIONS = Registry(
    "correction",
    {
        "truncated": "ludus.algos.importance:truncated_importance",
        "masked": "ludus.algos.importance:masked_importance",
    },
)
DIVERGENCES = Registry("divergence", {k: f"ludus.algos.kl:{k}" for k in ("k1", "k2", "k3")})

Options = Mapping[str, Any]


def load_estimator(name: str, options: Options | None = None) -> Estimator:
    """An advantage estimator with its options bound."""
    bound: Estimator = _bound(ESTIMATORS, name, options)
    return checked_estimator(name, bound, needs_of(ESTIMATORS.load(name))) if _is_own(name) else bound


def load_loss(name: str, options: Options | None = None) -> PolicyLoss:
    """A policy loss with its options bound."""
    bound: PolicyLoss = _bound(LOSSES, name, options)
    return checked_loss(name, bound) if _is_own(name) else bound


def load_aggregation(name: str, options: Options | None = None) -> Aggregation:
    """An aggregation with its options bound."""
    bound: Aggregation = _bound(AGGREGATIONS, name, options)
    return checked_aggregation(name, bound) if _is_own(name) else bound


def load_correction(name: str, options: Options | None = None) -> Correction:
    """An importance correction with its options bound."""
    bound: Correction = _bound(CORRECTIONS, name, options)
    return checked_correction(name, bound) if _is_own(name) else bound


def load_divergence(name: str) -> Divergence:
    """An estimator of the divergence from a reference."""
    bound: Divergence = _bound(DIVERGENCES, name, None)
    return bound


@dataclass(frozen=True, slots=True)
class Plan:
    """What a well-known algorithm is made of: names and options, where they differ from the defaults."""

    estimator: str
    loss: str = "clipped"
    loss_options: Options = field(default_factory=dict)
    aggregation: str = "token"


ALGORITHMS: dict[str, Plan] = {
    "grpo": Plan("grpo"),
    "dr_grpo": Plan("dr_grpo", aggregation="length"),
    "dapo": Plan("grpo", loss_options={"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": Plan("grpo", loss="gspo", aggregation="sequence"),
    "cispo": Plan("grpo", loss="cispo"),
    "rloo": Plan("rloo", aggregation="sequence_sum"),
    "reinforce": Plan("reinforce"),
    "reinforce_pp": Plan("reinforce_pp"),
    "reinforce_pp_baseline": Plan("reinforce_pp_baseline"),
    "ppo": Plan("gae"),
    "turn_grpo": Plan("turn_grpo"),
    "gigpo": Plan("gigpo"),
}
"""A recipe's `algorithm`: one of these, or a reference to an estimator of one's own."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Everything that an update needs to know, ready to be called."""

    estimate: Estimator
    loss: PolicyLoss
    weigh: Aggregation
    needs: frozenset[Need]


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
) -> Algorithm:
    """The algorithm of that name; `options` are its estimator's, and what is left out is as usual for it."""
    plan = ALGORITHMS.get(name)
    if plan is None:
        if ":" not in name:
            Registry("algorithm", dict.fromkeys(ALGORITHMS, "")).load(name)  # says what is known
        plan = Plan(name)
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
    )


def _is_own(name: str) -> bool:
    return ":" in name


def _bound(registry: Registry, name: str, options: Options | None) -> Any:
    function: Callable[..., Any] = registry.load(name)
    if not inspect.isfunction(function):
        raise ConfigError(f"the {registry.kind} {name!r} must be a function; it is {function!r:.80}")
    _check_signature(function, registry.kind, name, options or {})
    parsed = options_of(function).parse(options or {}, f"the options of the {registry.kind} {name!r}")
    chosen = {key: getattr(parsed, key) for key in type(parsed).model_fields}
    return partial(function, **chosen) if chosen else function


_TAKES = {
    "estimator": ("credit",),
    "loss": ("sampled",),
    "aggregation": ("trajectory_T", "trained_T"),
    "correction": ("sampled",),
    "divergence": ("logprobs_A", "reference_A"),
}
"""What a function is called with, by position. Everything else about it is an option."""


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
