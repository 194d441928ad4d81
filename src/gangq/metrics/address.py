"""Where metrics are served, as people write it."""

from __future__ import annotations

import re
from typing import NamedTuple

from gangq.errors import InvalidInput

_FORM = re.compile(r"(?:(?P<host>[^\s:\[\]]*|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host and a port; 0: any that is free."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """From HOST:PORT, or PORT for that of 127.0.0.1; [::1]:9187 for IPv6, :9187 for any address.

        Raises:
            InvalidInput: it is none of these.
        """
        found = _FORM.fullmatch(text)
        if found is None or int(found["port"]) > 65535:
            raise InvalidInput(
                f"{text!r} is no address: write 127.0.0.1:9187, [::1]:9187 or :9187 (any address)"
            )
        host = "127.0.0.1" if found["host"] is None else found["host"].strip("[]") or "0.0.0.0"
        return cls(host, int(found["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
