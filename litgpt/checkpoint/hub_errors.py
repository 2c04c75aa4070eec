# Licensed under the Apache License 2.0, see the LICENSE file.

"""What the hub's client raises, said in one line and a hint. No message holds a token."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator

from litgpt.errors import UserError, first_line

_REASONS = {401: "the token is missing or wrong", 403: "access is denied", 404: "it was not found"}


@contextlib.contextmanager
def explained(repo_id: str, spelling_hint: Callable[[], str]) -> Iterator[None]:
    """Raise `UserError` in place of the client's own errors.

    Args:
        repo_id: the repository that is being asked for.
        spelling_hint: makes what to say when it does not exist.
    """
    from huggingface_hub import errors

    try:
        yield
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise _explain(repo_id, spelling_hint, error) from error


def is_network_down(error: Exception) -> bool:
    """Whether the hub could not be asked at all: no connection, or HF_HUB_OFFLINE is set."""
    from huggingface_hub import errors

    answered = isinstance(error, errors.HfHubHTTPError)
    return not answered and isinstance(error, (errors.HTTPError, ConnectionError, TimeoutError))


def _explain(repo_id: str, spelling_hint: Callable[[], str], error: Exception) -> UserError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    login = "set HF_TOKEN (or --access_token) to a token that may read it"
    if isinstance(error, errors.GatedRepoError):  # a kind of RepositoryNotFoundError, so it comes first
        accept = f"accept it at {hub}/{repo_id}, then {login}"
        return UserError(f"{repo_id} is gated: its owner wants you to accept a licence", accept)
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"{repo_id} does not exist on {hub}, or it is private", f"{spelling_hint()}; if it is private, {login}"
        )
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{repo_id!r} is not a repository id", "write it as org/name")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        reason = _REASONS.get(status, "the server failed")
        hint = login if status in (401, 403) else "try again later: what has arrived is kept"
        return UserError(f"cannot download {repo_id}: {reason} (HTTP {status})", hint)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            f"{repo_id} is not complete on this machine, and HF_HUB_OFFLINE is set", "unset it to download the rest"
        )
    if is_network_down(error):
        hint = "check the network, then start again: what has arrived is kept"
        return UserError(f"cannot download {repo_id} from {hub}: {first_line(error)}", hint)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return UserError(f"cannot store {repo_id}: {error}", "free some space, then start again" if full else "")
