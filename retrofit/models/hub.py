"""What to tell a user when a checkpoint cannot be fetched: which ids come near, and how to work without a network."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError

from retrofit.errors import ModelError, nearest

_REMEDY = (
    "name a local folder instead (timm:DIR or hf:DIR), or fill the Hugging Face cache where there is a network and set "
    "HF_HUB_OFFLINE=1 here"
)


@contextmanager
def fetching(source: str) -> Iterator[None]:
    """Turns the hub's failures inside the block into one ModelError that says what would work."""
    work_offline_without_network()
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{source} cannot be loaded: its weights are damaged, or no plain tensors ({reason})"
        ) from error
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        causes = list(_chain(error))
        if any(isinstance(c, GatedRepoError) for c in causes):
            raise ModelError(f"{source} asks for its terms to be accepted on the hub, and for HF_TOKEN here") from error
        if any(isinstance(c, RepositoryNotFoundError | HFValidationError) for c in causes):
            raise ModelError(f"{source} is not on the hub{nearest(source, cached_ids())}") from error
        offline = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)
        if any(isinstance(c, offline) for c in causes):
            hint = nearest(source, cached_ids())
            raise ModelError(
                f"{source} is not in the local cache and the hub cannot be reached{hint}; {_REMEDY}"
            ) from error
        raise ModelError(f"{source} cannot be loaded: {' '.join(str(error).split())}") from error


def cached_ids() -> list[str]:
    """The model ids in the local cache, as sources: `hf/ID`, and `timm/NAME` for timm's."""
    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    ids = sorted(r.repo_id for r in repos if r.repo_type == "model")
    return [i if i.startswith("timm/") else f"hf/{i}" for i in ids]


def work_offline_without_network() -> None:
    """The hub's client retries for a minute where its name cannot even be resolved; say so at once instead."""
    proxied = any(os.environ.get(k) or os.environ.get(k.lower()) for k in ("HTTPS_PROXY", "ALL_PROXY"))
    if constants.HF_HUB_OFFLINE or proxied:
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except socket.gaierror:
        constants.HF_HUB_OFFLINE = True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
