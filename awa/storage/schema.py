"""The schema that an installation lives in: its name, in SQL and on the bell.

Migrations and statements are written for a schema called ``awa``. ``Schema.sql`` rewrites them for any other name, so
that two installations share a database and never meet. It knows two spellings and no others:

- the prefix ``awa.`` as a word of its own: ``awa.jobs``, ``'awa.ring_seq'::regclass``, ``format('awa.%I', …)``,
  ``'awa.queue:' || p_queue`` (the key of an advisory lock). A dot that ends a sentence is left alone;
- the quoted identifier ``"awa"``, where the schema is meant by itself: ``GRANT USAGE ON SCHEMA "awa"``,
  ``SET search_path = "awa"``, ``'"awa"'::regnamespace``.

Both are rewritten wherever they stand, inside literals too. What is *not* to be renamed must be spelled otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from awa.config import check_schema

_MENTION = re.compile(r'"awa"|(?<![\w$."])awa\.(?=\S)')


@dataclass(frozen=True, slots=True)
class Schema:
    """The name of one installation's schema.

    A name has 1 to 63 bytes of letters, digits, ``_``, ``-`` and spaces, not only spaces, and does not start with
    ``pg_``. That leaves out quotes, backslashes, ``$`` and ``%``, which is what makes ``sql`` safe inside any literal
    and any function body, and beside psycopg's placeholders.

    Raises:
        ConfigError: The name breaks that rule.
    """

    name: str = "awa"
    """As PostgreSQL stores it: unquoted, case kept."""

    def __post_init__(self) -> None:
        check_schema(self.name)

    @property
    def identifier(self) -> str:
        """The name as SQL spells it: ``awa`` as it is, any other in quotes.

        The spelling is part of every advisory lock's key, so it follows from the name alone and from no list of
        reserved words, which grows.
        """
        return self.name if self.name == "awa" else f'"{self.name}"'

    @property
    def channel(self) -> str:
        """The NOTIFY channel of this schema, as ``awa.channel()`` gives it: 20 characters for any name."""
        from hashlib import sha256  # it loads OpenSSL, which a program that inserts nothing need not wait for

        digest = sha256(self.sql("awa.bell").encode()).hexdigest()
        return "awa_" + digest[:16]

    def command(self, words: str) -> str:
        """What an operator types for this schema: ``awa`` and *words*."""
        return f"awa {words}{self.option}"

    @property
    def option(self) -> str:
        """What a command is given for this schema, with a blank before it; empty for the usual one."""
        return "" if self.name == "awa" else f" --schema '{self.name}'"

    def sql(self, text: str) -> str:
        """*text*, written for the schema ``awa``, as this schema needs it. Remembered for each text."""
        return _rewrite(self, text)


@lru_cache(maxsize=1024)
def _rewrite(schema: Schema, text: str) -> str:
    identifier = schema.identifier
    return _MENTION.sub(lambda mention: identifier if mention[0] == '"awa"' else identifier + ".", text)
