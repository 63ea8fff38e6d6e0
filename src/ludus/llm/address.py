"""Where a model is served: an OpenAI-compatible base URL and the name of one of its models."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from ludus.core.failures import ConfigError

API_KEY = "LUDUS_API_KEY"
"""The environment variable with the server's key."""
_SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's base URL and one of its models (None: the only one it has): http://127.0.0.1:8000/v1#NAME."""

    url: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """From the base address, which ends in /v1 as a rule, with the model's name after a #."""
        try:
            parts = urlsplit(text)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is not an address: {error}") from None
        if not is_address(text) or not host:
            raise ConfigError(f"{text!r} is not an address such as http://127.0.0.1:8000/v1#NAME")
        if parts.username or parts.password:
            raise ConfigError(
                "an address with a password in it would end up in reports: put the key into the "
                f"environment as {API_KEY} instead"
            )
        if parts.query:
            raise ConfigError(f"an address has no query: leave out '?{parts.query}'")
        url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return cls(url, parts.fragment or None)

    def __str__(self) -> str:
        return self.url if self.model is None else f"{self.url}#{self.model}"


def is_address(text: str) -> bool:
    """Whether this names a server rather than a folder or a model on the hub."""
    return text.lower().startswith(_SCHEMES)
