"""awa in Flask apps: one object beside ``db``, a client for each app, jobs in their app's context.

    queue = Awa()                                    # at the top of a module; declares tasks, knows no app

    app.extensions["awa"]                            # made by init_app: which Awa, and the app's client
        client                                       # made at its first use in the app; opens nothing before it is used
        worker -> handler in an app context          # pushed and torn down around every job

An Awa refers to no app: an app that is gone takes its client along.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from flask import Flask, current_app, has_app_context

from awa import options
from awa.client import Client
from awa.config import Settings, config_key, find_database, is_on, load_settings
from awa.errors import ConfigError, ValidationError

if TYPE_CHECKING:
    from awa.admin import Admin

__all__ = ["Awa"]

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("awa.job")

NAME = "awa"
"""Of the entry in ``app.extensions`` and of the group of commands."""


class _OfClient(Generic[P, R]):
    """A method of the client, called on that of the current app."""

    def __init__(self, method: Callable[Concatenate[Client, P], R]) -> None:
        self._name = method.__name__
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, awa: None, owner: type) -> Self: ...

    @overload
    def __get__(self, awa: Awa, owner: type) -> Callable[P, R]: ...

    def __get__(self, awa: Awa | None, owner: type) -> Self | Callable[P, R]:
        if awa is None:
            return self
        method: Callable[P, R] = getattr(awa.client, self._name)
        return method


class Awa:
    """The queue of one or more Flask apps.

    Tasks, queues, kinds and hooks are declared on it like on an :class:`awa.Client`, before there is an app. Whatever
    inserts or looks needs an app context, and works with the client of that app: its database and settings are those of
    its config.

    Jobs run in an app context of their own of the app whose worker it is; so do the hooks.

    Args:
        app: The same as calling :meth:`init_app` with it.

    Raises:
        ConfigError: As :meth:`init_app` does.
    """

    def __init__(self, app: Flask | None = None) -> None:
        self._declared = Client()
        """What was declared; it never opens a connection."""
        self.task = self._declared.task
        self.queue = self._declared.queue
        self.job_kind = self._declared.job_kind
        self.on_worker_start = self._declared.on_worker_start
        self.on_worker_stop = self._declared.on_worker_stop
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Make this the queue of *app*, and give it the commands ``flask awa ...``. Opens and starts nothing.

        Raises:
            ConfigError: A key ``AWA_...`` of its config is unknown or its value cannot work, or it has a queue already.
        """
        from awa.ext.flask_commands import commands

        if not isinstance(app, Flask):
            raise ConfigError(f"init_app takes a Flask app, got {app!r}")
        if NAME in app.extensions:
            raise ConfigError(f"the app {app.name!r} has a queue already: call init_app once for each app")
        read_config(app.config)
        app.extensions[NAME] = _State(self)
        app.cli.add_command(commands)

    @property
    def client(self) -> Client:
        """The client of the current app, made when it is first asked for.

        Raises:
            RuntimeError: There is no current app, or it was not given to this object.
            ConfigError: Its config cannot work.
        """
        if not has_app_context():
            raise RuntimeError(
                "this needs an app context, which says whose queue is meant: use it in a view, a job or a command of"
                " flask, or write `with app.app_context():` around it"
            )
        app = current_app._get_current_object()  # type: ignore[attr-defined]
        state = app.extensions.get(NAME)
        if not isinstance(state, _State) or state.awa is not self:
            raise RuntimeError(f"the app {app.name!r} does not belong to this Awa: call its init_app(app) first")
        return state.client_of(app)

    insert = _OfClient(Client.insert)
    insert_many = _OfClient(Client.insert_many)
    insert_many_copy = _OfClient(Client.insert_many_copy)
    insert_async = _OfClient(Client.insert_async)
    insert_many_async = _OfClient(Client.insert_many_async)
    insert_many_copy_async = _OfClient(Client.insert_many_copy_async)
    get = _OfClient(Client.get)
    result = _OfClient(Client.result)
    cancel = _OfClient(Client.cancel)
    cancel_by_unique_key = _OfClient(Client.cancel_by_unique_key)
    retry = _OfClient(Client.retry)
    worker = _OfClient(Client.worker)
    connection = _OfClient(Client.connection)
    close = _OfClient(Client.close)

    @property
    def admin(self) -> Admin:
        """For operators, see :attr:`awa.Client.admin`."""
        return self.client.admin


class _State:
    """What an app has of its queue."""

    def __init__(self, awa: Awa) -> None:
        self.awa = awa

    def client_of(self, app: Flask) -> Client:
        """The client of *app*."""
        made: Client | None = vars(self).get("client")
        if made is None:
            # without a lock, which a fork might find taken: of two threads the second drops what it made and never used
            made = vars(self).setdefault("client", AppClient(app, self.awa._declared))
        return made

    def renewed(self, app: Flask, *, database: str | None, flags: Mapping[str, object]) -> Client:
        """The client of *app* from now on: one for which these go before the config."""
        made = vars(self)["client"] = AppClient(app, self.awa._declared, database=database, flags=flags)
        return made


class AppClient(Client):
    """The client of *app*: as its config says, with the tasks that were declared for *tasks*.

    Args:
        database: One that goes before the config.
        flags: Settings that go before the config.
    """

    def __init__(
        self, app: Flask, tasks: Client, *, database: str | None = None, flags: Mapping[str, object] | None = None
    ) -> None:
        said = read_config(app.config)
        self._app = app
        self._config = said.settings
        self._flags = dict(flags or {})
        super().__init__(database or said.database, tasks_of=tasks, **said.options)
        if said.is_eager:
            from awa.testing import inline

            self._eager = inline(self, after_commit=True)
            self._eager.__enter__()

    def _settings(self, arguments: dict[str, Any] | None = None, flags: dict[str, object] | None = None) -> Settings:
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        return load_settings(given, flags=self._flags | (flags or {}), config=self._config)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return in_context(self._app, function)


# --- config


@dataclass(frozen=True, slots=True)
class AppConfig:
    """What the config of an app says."""

    database: str | None
    """Its database; None: what the environment says."""
    options: dict[str, Any]
    """Arguments of a client."""
    settings: dict[str, object]
    """Settings by name."""
    is_eager: bool
    """Whether jobs run where they are inserted."""


_OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "queue": options.check_queue,
    "priority": options.check_priority,
    "max_attempts": options.check_max_attempts,
    "pool_size": options.check_pool_size,
}
"""Those of a client that are no settings, and what checks them."""

_SETTINGS = [one.name for one in fields(Settings) if one.name != "sources"]

_KEYS = {f"AWA_{name.upper()}": name for name in (*_SETTINGS, *_OPTIONS, "database_url", "eager")}


def read_config(config: Mapping[str, Any]) -> AppConfig:
    """Read the ``AWA_...`` keys of an app's config; None and empty text count as not given.

    The database is that of ``AWA_DATABASE_URL``, here or in the environment; else that of Flask-SQLAlchemy, when it is
    PostgreSQL; else it is looked for as :func:`awa.config.find_database` does.

    Raises:
        ConfigError: A key is unknown, or a value is refused; the message names it.
    """
    said = {key: value for key, value in config.items() if key.startswith("AWA_") and not _is_empty(value)}
    for key, value in said.items():
        if key not in _KEYS and os.environ.get(key) != value:  # some copy the whole environment
            raise ConfigError(_unknown(key))
    named = {_KEYS[key]: value for key, value in said.items() if key in _KEYS}
    settings = {name: named[name] for name in _SETTINGS if name in named}
    load_settings(config=settings)
    return AppConfig(
        database=_database(config),
        options={name: _option(name, named[name]) for name in _OPTIONS if name in named},
        settings=settings,
        is_eager=is_on(named.get("eager", False), config_key("eager")),
    )


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _unknown(key: str) -> str:
    from difflib import get_close_matches

    nearest = get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
    return f"app.config has {key!r}, which awa does not know: the nearest that it knows is {nearest!r}"


def _option(name: str, value: Any) -> Any:
    if name != "queue" and isinstance(value, str) and value.strip().isdecimal():
        value = int(value)  # as settings are read
    try:
        return _OPTIONS[name](value)
    except ValidationError as error:
        raise ConfigError(f"{config_key(name)}: {error}") from None


def _database(config: Mapping[str, Any]) -> str | None:
    for key in ("AWA_DATABASE_URL", "SQLALCHEMY_DATABASE_URI"):
        url: Any = config.get(key)
        if hasattr(url, "render_as_string"):  # a URL of SQLAlchemy
            url = url.render_as_string(hide_password=False)
        is_ours = key.startswith("AWA_")
        if not _is_empty(url) and (is_ours or str(url).strip().startswith("postgres")):
            if not isinstance(url, str):
                raise ConfigError(f"app.config[{key!r}] must be a connection string or URL, got a {type(url).__name__}")
            found = find_database(url, {}, source=f"app.config[{key!r}]")
            return None if found is None else found.conninfo
        if is_ours and os.environ.get(key, "").strip():
            return None  # the client looks there itself
    return None


# --- the context of a job


def in_context(app: Flask, function: Callable[P, R]) -> Callable[P, R]:
    """*function*, called in an app context of its own.

    The context is torn down whatever *function* comes to, and that stands: what a teardown function raises is logged.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # In contextvars of its own, so that nothing that is pushed here, by whomever, outlives the call.
        return Context().run(_call, app, partial(function, *args, **kwargs))

    return call


def _call(app: Flask, function: Callable[[], R]) -> R:
    # DeadlineExceeded may be raised between any two steps, once.
    context = app.app_context()
    context.push()
    error: BaseException | None = None
    is_over = False
    try:
        try:
            result = function()
        except BaseException as raised:
            error = raised
        context.pop(error)
        is_over = True
    except BaseException:
        if not is_over:
            log.exception("a teardown function of the app %r failed; what the job came to stands", app.name)
            context.push()
            _tear_down(app, error)
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # whose traceback refers to this frame


def _tear_down(app: Flask, error: BaseException | None) -> None:
    """Call every teardown function: the one that failed kept others from being called, such as the session's."""
    for function in reversed(app.teardown_appcontext_funcs):
        try:
            app.ensure_sync(function)(error)
        except Exception:
            log.exception("a teardown function of the app %r failed", app.name)
