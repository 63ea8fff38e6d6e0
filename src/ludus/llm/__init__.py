"""Language models that are asked, and not trained: over OpenAI-compatible addresses, with limits and a cache.

`load_chat_model` makes a `ChatModel` of an address or a table, `ask_json` gets checked data out of one. Judges,
rubrics and synthesis use nothing else.
"""

from ludus.llm.config import ChatModelConfig, load_chat_model
from ludus.llm.json_reply import JsonReply, UnusableReply, ask_json, parse_json
from ludus.llm.limits import (
    BudgetExceeded,
    CachedChatModel,
    ChatBudget,
    ChatLimits,
    ChatUsage,
    CountsUsage,
    LimitedChatModel,
)
from ludus.llm.remote import API_KEY, Address, ChatError, ModelServerClient, RemoteChatModel, is_address
from ludus.remote.client import RetryPolicy

__all__ = [
    "API_KEY",
    "Address",
    "BudgetExceeded",
    "CachedChatModel",
    "ChatBudget",
    "ChatError",
    "ChatLimits",
    "ChatModelConfig",
    "ChatUsage",
    "CountsUsage",
    "JsonReply",
    "LimitedChatModel",
    "ModelServerClient",
    "RemoteChatModel",
    "RetryPolicy",
    "UnusableReply",
    "ask_json",
    "is_address",
    "load_chat_model",
    "parse_json",
]
