"""The vocabulary every other room speaks: tasks, messages, trajectories, failures, interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.core.config import Config
    from ludus.core.failures import (
        Aborted,
        Boundary,
        ConfigError,
        EngineError,
        Failure,
        Fault,
        InfraError,
        LudusError,
        MissingExtraError,
        ToolFault,
    )
    from ludus.core.generation import Completion, Engine, FinishReason, Sampling, VersionSpan
    from ludus.core.messages import (
        Media,
        MediaSpan,
        Message,
        ToolCall,
        ToolContext,
        ToolResult,
        ToolSet,
        ToolSpec,
        parse_messages,
    )
    from ludus.core.random import key, shuffled, uniform, uniforms
    from ludus.core.registry import Registry
    from ludus.core.task import Task
    from ludus.core.tokenizer import ByteTokenizer, Tokenizer
    from ludus.core.trajectory import (
        Branch,
        EnvRender,
        Group,
        GroupReward,
        Reward,
        Segment,
        SegmentKind,
        StopReason,
        TimeSpan,
        TokenSequence,
        Trajectory,
        is_success,
    )

__all__ = [
    "Aborted",
    "Boundary",
    "Branch",
    "ByteTokenizer",
    "Completion",
    "Config",
    "ConfigError",
    "Engine",
    "EngineError",
    "EnvRender",
    "Failure",
    "Fault",
    "FinishReason",
    "Group",
    "GroupReward",
    "InfraError",
    "LudusError",
    "Media",
    "MediaSpan",
    "Message",
    "MissingExtraError",
    "Registry",
    "Reward",
    "Sampling",
    "Segment",
    "SegmentKind",
    "StopReason",
    "Task",
    "TimeSpan",
    "TokenSequence",
    "Tokenizer",
    "ToolCall",
    "ToolContext",
    "ToolFault",
    "ToolResult",
    "ToolSet",
    "ToolSpec",
    "Trajectory",
    "VersionSpan",
    "is_success",
    "key",
    "parse_messages",
    "shuffled",
    "uniform",
    "uniforms",
]

__getattr__, __dir__ = lazy_exports(__name__)
