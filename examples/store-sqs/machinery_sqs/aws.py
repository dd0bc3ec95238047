"""What both stores share: clients of boto3, and its errors as ours.

Credentials come from where boto3 looks for them (environment, profile, role), never from a URL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)

from machinery_py.config.urls import redact
from machinery_py.errors import ConfigError, MachineryError, StoreUnusable

LONGEST_POLL = 1  # seconds that a request waits for messages
BUSY = {
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "ProvisionedThroughputExceededException",
}


def split(url: str) -> tuple[str, str]:
    """Return region and prefix of `scheme://region/prefix`; either may be empty.

    Raises:
        ConfigError: it holds something else, such as a key.
    """
    rest = url.partition("://")[2]
    region, _, prefix = rest.partition("/")
    if not (region + prefix).replace("-", "").replace("_", "").isalnum() and rest not in ("", "/"):
        raise ConfigError(
            f"URL {redact(url)!r}: expected scheme://region/prefix, such as sqs://eu-west-1/shop- "
            "(boto3 finds the credentials; another endpoint is an option of the store)"
        )
    return region, prefix


def connect(service: str, region: str, endpoint: str, timeout: float) -> Any:
    """Return a client whose every request ends in time. Nothing is sent yet."""
    if "@" in endpoint:
        raise ConfigError("endpoint: a URL without credentials is expected; boto3 finds those")
    config = ClientConfig(
        connect_timeout=timeout,
        read_timeout=timeout + LONGEST_POLL,
        retries={"total_max_attempts": 1},  # a repeat might double a message; our callers repeat
        max_pool_connections=32,
    )
    return boto3.client(
        service, region_name=region or None, endpoint_url=endpoint or None, config=config
    )


def failure(what: str, error: Exception, away: type[MachineryError]) -> MachineryError:
    """Return our error for one of boto3. It quotes no address, key or body."""
    if isinstance(error, ClientError):
        code = code_of(error)
        return (away if is_busy(error) else StoreUnusable)(f"{what}: AWS answers {code}")
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return StoreUnusable(f"{what}: boto3 finds no credentials (see its documentation)")
    return away(f"{what}: {type(error).__name__}")


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "an error"))


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))


def is_busy(error: ClientError) -> bool:
    """Return whether the trouble may pass."""
    return status_of(error) >= 500 or "Throttl" in code_of(error) or code_of(error) in BUSY


def was_carried_out(error: Exception) -> bool:
    """Return whether the request may have been carried out nevertheless."""
    if isinstance(error, ClientError):
        return status_of(error) >= 500
    unsent = (EndpointConnectionError, ConnectTimeoutError, NoCredentialsError)
    return not isinstance(error, (*unsent, PartialCredentialsError))


@contextlib.contextmanager
def asking(what: str, away: type[MachineryError]) -> Iterator[None]:
    """Turn errors of boto3 into StoreUnusable, or `away` if the trouble may pass."""
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise failure(what, error, away) from error
