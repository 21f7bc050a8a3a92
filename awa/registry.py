"""Kind -> task: what ``client.task`` makes of a function, and where it is found again."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Self, TypeVar

from awa import job as jobs
from awa._core import derive_kind
from awa.args import Codec, FunctionCodec, codec_for, parameter_hints, result_dumper, signature_of
from awa.descriptors import Descriptor
from awa.errors import ConfigError, DuplicateKind, UnknownKind, ValidationError
from awa.limits import Limits
from awa.options import (
    check_flag,
    check_job_key,
    check_kind,
    check_max_attempts,
    check_priority,
    check_queue,
    check_timeout,
    declared,
)
from awa.retry import ExceptionTypes, RetryPolicy, check_exception_types, check_policy
from awa.unique import Unique, check_unique

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

KeyOption = str | Callable[..., str | None]
"""A ``concurrency_key`` or ``ordering_key`` as a task declares it: what its jobs share, or what tells it from a job's
args."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a declaration says about its jobs, as :meth:`declare` checked it; None where it says nothing."""

    queue: str | None = None
    """Where its jobs wait unless an insert says otherwise."""
    priority: int | None = None
    """1, which runs first, to 4."""
    max_attempts: int | None = None
    """1 to 1000."""
    timeout: float | None = None
    """Seconds an attempt may take; 0 for no limit."""
    retry: RetryPolicy | None = None
    """Attempt -> delay after a failure."""
    retry_on: ExceptionTypes | None = None
    """When given, only these exceptions are retried."""
    fail_on: ExceptionTypes | None = None
    """These fail the job at once."""
    unique: Unique | None = None
    """What makes its jobs equal."""
    keep_result: bool = False
    """Whether what the handler returns is kept for who asks for it."""
    concurrency_key: KeyOption | None = None
    """What its jobs share, so that only so many of them run at once."""
    ordering_key: KeyOption | None = None
    """What its jobs share, so that they run one after the other."""
    has_keys: bool = field(init=False, default=False)
    """Whether it says one of the two: one look for every insert."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_keys", self.concurrency_key is not None or self.ordering_key is not None)

    @classmethod
    def declare(
        cls,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: float | timedelta | None = None,
        retry: RetryPolicy | None = None,
        retry_on: type[BaseException] | Sequence[type[BaseException]] | None = None,
        fail_on: type[BaseException] | Sequence[type[BaseException]] | None = None,
        unique: Unique | None = None,
        keep_result: bool = False,
        concurrency_key: KeyOption | None = None,
        ordering_key: KeyOption | None = None,
    ) -> Self:
        """The options as they are used: a ``timedelta`` as seconds, exceptions as a tuple.

        Raises:
            ConfigError: One of them cannot work; the message names it.
        """
        return cls(
            queue=None if queue is None else declared(check_queue, queue),
            priority=None if priority is None else declared(check_priority, priority),
            max_attempts=None if max_attempts is None else declared(check_max_attempts, max_attempts),
            timeout=None if timeout is None else declared(check_timeout, timeout),
            retry=None if retry is None else check_policy(retry),
            retry_on=None if retry_on is None else check_exception_types(retry_on, "retry_on"),
            fail_on=None if fail_on is None else check_exception_types(fail_on, "fail_on"),
            unique=check_unique(unique),
            keep_result=declared(lambda value: check_flag(value, "keep_result"), keep_result),
            concurrency_key=_check_key_option(concurrency_key, "concurrency_key"),
            ordering_key=_check_key_option(ordering_key, "ordering_key"),
        )


def _check_key_option(value: object, name: str) -> KeyOption | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    if isinstance(value, str):
        return declared(lambda text: check_job_key(text, name), value)
    raise ConfigError(
        f"{name} must be a str of 1 to 200 characters, or a function that gives it from a job's args, got {value!r}"
    )


@dataclass(frozen=True, slots=True)
class BoundArgs:
    """A call of a plain function's task, not made yet: what ``task.bind(...)`` gives and ``insert`` takes."""

    task: Task[..., Any]
    """Whose kind, options and codec the job has."""
    args: dict[str, Any]
    """The arguments by name, defaults applied."""

    @property
    def kind(self) -> str:
        """The kind of the job."""
        return self.task.kind

    def dump(self, max_bytes: int) -> bytes:
        """JSON text of the arguments; see :meth:`awa.args.Codec.dump`."""
        return self.task.codec.dump(self.args, max_bytes)


class Task(Generic[P, R]):
    """A function that handles the jobs of a kind; still callable as itself.

    Its only parameter is a job (``job: awa.Job[SendEmail]``) or its parameters are the args.

    Args:
        func: A plain function.
        kind: Name of its jobs; else derived from the type of the args, or from the function's name.
        aliases: Older kinds that it handles too.
        options: What holds for its jobs unless an insert says otherwise.

    Raises:
        ConfigError: The function cannot be a handler, its args cannot be stored, or a kind cannot work.
    """

    kind: str
    """Name of the jobs it handles and of those it makes."""
    aliases: tuple[str, ...]
    """Older kinds that it handles too."""
    options: TaskOptions
    """What the declaration says."""
    codec: Codec
    """For the args of its jobs; of a plain function, for keyword arguments."""
    is_typed: bool
    """Whether it takes the job, not the args."""
    args_type: Any
    """The declared type of the args; dict for a bare Job and for a plain function."""

    def __init__(
        self,
        func: Callable[P, R],
        *,
        kind: str | None = None,
        aliases: Iterable[str] = (),
        options: TaskOptions | None = None,
    ) -> None:
        _check_handler(func)
        functools.update_wrapper(self, func)
        self.func = func
        of_job = _job_args_type(func)
        self.is_typed = of_job is not None
        self.args_type = dict if of_job is None else of_job
        self.codec = FunctionCodec(func) if of_job is None else codec_for(of_job)
        if kind is None:
            named = typing.get_origin(self.args_type) or self.args_type
            kind = derive_kind(func if _is_untyped_mapping(named) else named)
        self.kind = declared(check_kind, kind)
        if isinstance(aliases, str):
            raise ConfigError(f"aliases must be a list of kinds, got the str {aliases!r}: write [{aliases!r}]")
        self.aliases = tuple(declared(lambda alias: check_kind(alias, "aliases"), alias) for alias in aliases)
        self.options = options or TaskOptions()
        if self.options.unique is not None:
            self.options.unique.check_names(self.codec.names, self.kind)
        self.dump_result = result_dumper(func) if self.options.keep_result else None
        self._concurrency_key = self._key_of("concurrency_key")
        self._ordering_key = self._key_of("ordering_key")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now; no job is made."""
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.kind!r}: {_where(self.func)}>"

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundArgs:
        """Args of this kind for ``insert``, given as in a call of the function.

        Raises:
            ValidationError: The call does not fit the function's signature.
            ConfigError: The function takes a job: insert a value of the type of its args.
        """
        if not isinstance(self.codec, FunctionCodec):
            raise ConfigError(
                f"{_where(self.func)} takes a job, so there is nothing to bind: insert its args themselves, as in"
                f" client.insert({getattr(self.args_type, '__name__', self.args_type)}(...))"
            )
        return BoundArgs(self, self.codec.bind(*args, **kwargs))

    def concurrency_key_of(self, args: Any) -> str | None:
        """The ``concurrency_key`` of a job that has *args*, by the declaration; None when it has none.

        Args:
            args: Of the declared type; of a plain function, its arguments by name.

        Raises:
            ValidationError: The function that tells it raised, or gave what is no key.
        """
        return self._concurrency_key(args)

    def ordering_key_of(self, args: Any) -> str | None:
        """The ``ordering_key``, likewise."""
        return self._ordering_key(args)

    def _key_of(self, name: str) -> Callable[[Any], str | None]:
        """What tells the key *name* of a job from its args.

        Raises:
            ConfigError: The declared function cannot be called with them.
        """
        said: KeyOption | None = getattr(self.options, name)
        if isinstance(said, str) and self.codec.names is not None and said in self.codec.names:
            given = "args" if not isinstance(self.codec, FunctionCodec) else said
            value = f"{given}.{said}" if given == "args" else said
            raise ConfigError(
                f"{name}={said!r} of task {self.kind!r} is a text that all of its jobs would share, and the name of one"
                f" of its args: for the value of that write {name}=lambda {given}: {value}, else choose another text"
            )
        if said is None or isinstance(said, str):
            return lambda args: said
        give = self._calling(said, name)

        def key_of(args: Any) -> str | None:
            try:
                key = give(args)
            except Exception as error:
                raise ValidationError(
                    f"the {name} of task {self.kind!r} cannot be told: {_where(said)} raised {type(error).__name__}: "
                    f"{error}; have it return text, or None for a job without one",
                    path=name,
                    value=args,
                ) from error
            if key is None:
                return None
            try:
                return check_job_key(key, name)
            except ValidationError as error:
                raise ValidationError(
                    f"{error} ({_where(said)} of task {self.kind!r} gave it; it may return None)",
                    path=name,
                    value=error.value,
                    limit=error.limit,
                ) from None

        return key_of

    def _calling(self, said: Callable[..., str | None], name: str) -> Callable[[Any], object]:
        """*said* as a function of a job's args: it takes them as they are, or of a plain function those it names."""
        if inspect.iscoroutinefunction(said) or inspect.isgeneratorfunction(said):
            raise ConfigError(f"{name} takes a plain function: calling {_where(said)} gives no text")
        try:
            signature = inspect.signature(said)
        except (TypeError, ValueError):  # built in, and does not say
            signature = None
        if not isinstance(self.codec, FunctionCodec):
            if signature is not None:
                try:
                    signature.bind(None)
                except TypeError as error:
                    raise ConfigError(
                        f"{name} of task {self.kind!r}: {_where(said)} is called with the args alone, and {error}"
                    ) from None
            return said
        if signature is None or any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
            return lambda args: said(**args)
        names = self.codec.names
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            is_needed = parameter.default is parameter.empty
            if parameter.kind is parameter.POSITIONAL_ONLY or (parameter.name not in names and is_needed):
                raise ConfigError(
                    f"{name} of task {self.kind!r}: {_where(said)} is called with args by name, and {parameter.name!r} "
                    f"is none that can be given so: name some of {', '.join(sorted(names)) or 'none, there are none'}"
                )
        wanted = [one for one in signature.parameters if one in names]
        return lambda args: said(**{one: args[one] for one in wanted})


class Registry:
    """The tasks of a client by kind and by the type of their args.

    Filled while modules are imported, read by workers afterwards; a dict's own operations are all the locking it needs.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, Task[..., Any]] = {}
        self._by_type: dict[Any, list[Task[..., Any]]] = {}
        self._queues: dict[str, tuple[Limits, Descriptor]] = {}
        self._described: dict[Any, Descriptor] = {}  # by kind, or by the type of args; the later of two counts

    def add(self, task: Task[..., Any]) -> None:
        """Register *task* under its kind and its aliases.

        Raises:
            DuplicateKind: One of them has a task already; nothing is registered then.
        """
        kinds = dict.fromkeys((task.kind, *task.aliases))
        for kind in kinds:
            other = self._by_kind.get(kind)
            if other is not None:
                raise DuplicateKind(
                    f"kind {kind!r} is handled by {_where(other.func)} and by {_where(task.func)}: give one of them "
                    "another kind=",
                    kind=kind,
                )
        for kind in kinds:
            self._by_kind[kind] = task
        if task.is_typed and not _is_untyped_mapping(task.args_type):
            self._by_type.setdefault(task.args_type, []).append(task)

    def add_queue(self, name: str, limits: Limits, descriptor: Descriptor) -> None:
        """Register what is declared about a queue, in place of what was."""
        self._queues[name] = limits, descriptor

    @property
    def queues(self) -> dict[str, Limits]:
        """The limits of the queues about which anything is declared, by name."""
        return {name: limits for name, (limits, _) in self._queues.items()}

    @property
    def queue_descriptors(self) -> dict[str, Descriptor]:
        """How these are described, by name."""
        return {name: descriptor for name, (_, descriptor) in self._queues.items()}

    def describe_kind(self, subject: object, descriptor: Descriptor) -> None:
        """Register how a kind is described, in place of what was.

        Args:
            subject: The kind, its task, or the type of its args, whose task may be declared later.

        Raises:
            ConfigError: It is none of the three, or several tasks have args of that type.
        """
        if isinstance(subject, Task):
            subject = subject.kind
        if isinstance(subject, str):
            subject = declared(check_kind, subject)
        elif not isinstance(typing.get_origin(subject) or subject, type) or _is_untyped_mapping(subject):
            raise ConfigError(
                f"job_kind takes a kind, a task, or the type of a task's args, got {subject!r}: give the name of the"
                " kind, as an insert of its jobs does"
            )
        else:
            self.for_type(subject)
        self._described.pop(subject, None)
        self._described[subject] = descriptor

    @property
    def kind_descriptors(self) -> dict[str, Descriptor]:
        """How kinds are described, by kind.

        Raises:
            ConfigError: One is described by a type of args that several tasks have.
        """
        return {self._kind_of(subject): descriptor for subject, descriptor in self._described.items()}

    def _kind_of(self, subject: Any) -> str:
        if isinstance(subject, str):
            return subject
        task = self.for_type(subject)
        return derive_kind(typing.get_origin(subject) or subject) if task is None else task.kind

    def find(self, kind: str) -> Task[..., Any] | None:
        """The task for *kind*, which may be an alias."""
        return self._by_kind.get(kind)

    def get(self, kind: str) -> Task[..., Any]:
        """The task for *kind*, which may be an alias.

        Raises:
            UnknownKind: There is none.
        """
        try:
            return self._by_kind[kind]
        except KeyError:
            known = ", ".join(sorted(self._by_kind)) or "none"
            raise UnknownKind(f"no handler for kind {kind!r}; registered are: {known}", kind=kind) from None

    def for_type(self, args_type: Any) -> Task[..., Any] | None:
        """The task whose jobs have args of *args_type*.

        Raises:
            ConfigError: There are several: the insert must say which.
        """
        tasks = self._by_type.get(args_type, [])
        if len(tasks) > 1:
            raise ConfigError(
                f"args of type {args_type!r} belong to the kinds {', '.join(task.kind for task in tasks)}: say which "
                "with kind="
            )
        return tasks[0] if tasks else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that has a task, aliases included, sorted."""
        return tuple(sorted(self._by_kind))


def check_hook(hook: T, name: str) -> T:
    """*hook* when it can be called without arguments.

    Raises:
        ConfigError: It is no function, or calling it would run nothing.
    """
    if not callable(hook) or isinstance(hook, type):
        raise ConfigError(f"{name} takes a function without parameters, got {hook!r}")
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise ConfigError(f"{name} takes a plain function: calling {_where(hook)} would run nothing")
    return hook


def _check_handler(func: Any) -> None:
    reason = None
    if isinstance(func, (staticmethod, classmethod)):
        reason = "is a method, and there is no object to call it on: move it out of the class"
    elif isinstance(func, type):
        reason = "is a class: decorate a function"
    elif isinstance(func, Task):
        reason = "is a task already"
    elif not callable(func) or not hasattr(func, "__name__") or not hasattr(func, "__qualname__"):
        reason = "is no function with a name: wrap it in one"
    elif inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
        reason = (
            "is a coroutine function, which a worker's thread cannot wait for: write it with def, or call asyncio.run"
        )
    elif inspect.isgeneratorfunction(func):
        reason = "is a generator function: calling it runs nothing; make it return"
    elif func.__name__ == "<lambda>":
        reason = "is a lambda, which has no name to find it by in another process: write it with def"
    elif inspect.ismethod(func) or _is_in_class_body(func):
        reason = "is a method, and there is no object to call it on: move it out of the class"
    if reason is not None:
        raise ConfigError(f"{_where(func)} cannot be a task: it {reason}")


def _is_in_class_body(func: Any) -> bool:
    owner = func.__qualname__.rpartition(".")[0]
    return bool(owner) and not owner.endswith("<locals>")


def _job_args_type(func: Callable[..., Any]) -> Any:
    """``T`` when *func* takes one ``Job[T]``, dict for a bare ``Job``, None when its parameters are the args."""
    signature = signature_of(func)
    hints = parameter_hints(func, signature)
    takers = [name for name, hint in hints.items() if (typing.get_origin(hint) or hint) is jobs.Job]
    if not takers:
        return None
    if len(signature.parameters) > 1:
        raise ConfigError(
            f"{_where(func)} cannot be a task: it takes a job ({takers[0]}) and other parameters; a handler takes "
            "the job alone, whose .args hold the rest, or the args alone and uses awa.current_job()"
        )
    parameter = signature.parameters[takers[0]]
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise ConfigError(f"{_where(func)} cannot be a task: it must take its job as a positional parameter")
    params = typing.get_args(hints[takers[0]])
    if not params or params[0] is Any or isinstance(params[0], TypeVar):
        return dict
    return params[0]


def _is_untyped_mapping(tp: Any) -> bool:
    named = typing.get_origin(tp) or tp
    return isinstance(named, type) and issubclass(named, typing.Mapping)


def _where(func: Any) -> str:
    return f"{getattr(func, '__module__', '?')}.{getattr(func, '__qualname__', repr(func))}"
