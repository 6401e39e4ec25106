"""Credentials by the standard AWS chain, shared between backends of one profile.

botocore resolves (environment, profiles, web identity, container, instance) and refreshes before
expiry; its answer is kept for some seconds, because asking it costs more than signing. Nothing here
is ever logged.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Final

import botocore.config
import botocore.exceptions
import botocore.session

from hsfs.backends.s3_sign import Credentials
from hsfs.core.errors import Unauthorised

_KEPT_S: Final = 5.0
_RENEW_S: Final = 2.0  # so long a chain that still gives what was refused is not asked again


class Chain:
    """The credential chain of one profile and credentials file ("" = the defaults)."""

    def __init__(self, profile: str, credentials_file: str) -> None:
        self._profile, self._file = profile, credentials_file
        self._lock = threading.Lock()
        self._session = self._open()
        self._source: botocore.credentials.Credentials | None = None
        self._kept: tuple[float, Credentials] | None = None
        self._in_vain: tuple[float, Credentials] | None = None  # a renewal that changed nothing

    def setting(self, name: str) -> str:
        """A setting of the profile or environment (`region`, `endpoint_url`, `ca_bundle`), or
        ""."""
        try:
            if name == "endpoint_url":
                return self._endpoint_url()
            return str(self._session.get_config_variable(name) or "")
        except botocore.exceptions.BotoCoreError as error:
            raise Unauthorised(self._what(), str(error)) from error

    def credentials(self) -> Credentials:
        """Valid credentials; may ask the network when they are due. Safe in any thread.

        Raises Unauthorised when the chain finds none.
        """
        kept = self._kept
        if kept is not None and time.monotonic() - kept[0] < _KEPT_S:
            return kept[1]
        with self._lock:
            try:
                if self._source is None:
                    self._source = self._session.get_credentials()
                if self._source is None:
                    self._session = self._open()  # files may be written meanwhile: read them anew
                    raise Unauthorised(
                        self._what(),
                        "no credentials found",
                        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or profile, "
                        "or anonymous = true for a public bucket",
                    )
                frozen = self._source.get_frozen_credentials()
            except botocore.exceptions.BotoCoreError as error:
                raise Unauthorised(self._what(), str(error), "check the AWS profile") from error
            found = Credentials(
                frozen.access_key or "", frozen.secret_key or "", frozen.token or ""
            )
            self._kept = (time.monotonic(), found)
            return found

    def renew(self, refused: Credentials) -> bool:
        """Ask the chain anew, files included, after a server refused what it gave; false when it
        gives the same."""
        with self._lock:
            if self._kept is not None and self._kept[1] != refused:
                return True  # another thread was here first
            vain = self._in_vain
            if vain is not None and vain[1] == refused and time.monotonic() - vain[0] < _RENEW_S:
                return False
            self._session, self._source, self._kept = self._open(), None, None
        if self.credentials() != refused:
            return True
        self._in_vain = (time.monotonic(), refused)
        return False

    def _open(self) -> botocore.session.Session:
        session = botocore.session.Session(profile=self._profile or None)
        if self._file:
            session.set_config_variable("credentials_file", os.path.expanduser(self._file))
        # Off the cloud the instance metadata service does not answer; botocore's own default of
        # one try of a second stays.
        return session

    def _endpoint_url(self) -> str:
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            return ""
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if url := os.environ.get(variable):
                return url
        return str(self._session.get_scoped_config().get("endpoint_url") or "")

    def _what(self) -> str:
        return f"AWS profile {self._profile}" if self._profile else "AWS credentials"


def chain(profile: str, credentials_file: str) -> Chain:
    """The process's one chain for these names (and the AWS_* variables as they are now)."""
    variables = frozenset((k, v) for k, v in os.environ.items() if k.startswith("AWS_"))
    return _shared(profile, credentials_file, hash(variables))


@functools.lru_cache(maxsize=64)
def _shared(profile: str, credentials_file: str, _variables: int) -> Chain:
    return Chain(profile, credentials_file)
