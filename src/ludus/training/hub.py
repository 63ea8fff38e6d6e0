"""Whether a hub has a model, asked once: what loads it asks file by file, and for most of a minute."""

from __future__ import annotations

from ludus.core.failures import ConfigError

_PATIENCE = 10.0
_known: set[str] = set()


def check_hub(name: str, revision: str | None = None) -> None:
    """Refuse a name that is neither in the hub's local cache nor known to a hub that can be reached."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if name in _known or isinstance(
            try_to_load_from_cache(name, "config.json", revision=revision), str
        ):
            return
    except HFValidationError as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor a name that a hub could have (owner/name)"
        ) from error
    hub = constants.ENDPOINT
    try:
        HfApi(endpoint=hub).model_info(name, timeout=_PATIENCE)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor a model that {hub} would show you: look at its "
            "spelling, or log in (hf auth login, or HF_TOKEN) if it is private"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
            "forbids to ask for it"
        ) from error
    except HfHubHTTPError:
        pass  # a mirror need not answer this question; whether it has the files will be seen
    except Exception as error:
        # what a broken connection raises depends on the library, and on its version, that the hub's client uses
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor in {constants.HF_HUB_CACHE}, and {hub} cannot be "
            f"reached ({type(error).__name__}: {error}): give a folder with the model, or mend the connection "
            "(HF_ENDPOINT names another hub)"
        ) from error
    _known.add(name)
