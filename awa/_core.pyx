# cython: language_level=3, auto_pickle=False, autotestdict=False
"""The compiled core: what runs once per job.

It opens no connection, takes no lock and knows no setting: values come in, bytes and arrays go out. Sections:

    values       what may be stored as JSON, and the text that is stored
    canonical    one text per value, for keys and hashes
    names        the kind of a class or a function
    attempts     claimed batches, their members, and what became of them
    loop         the threads that call handlers
"""

from cython cimport final
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_KIND
from libc.math cimport fabs, isfinite
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import datetime
import queue
import struct
import threading
import time

import blake3
import orjson

from awa.errors import ConfigError, ValidationError

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    int PyThreadState_SetAsyncExc(unsigned long thread, PyObject *exception)
    unsigned long PyThread_get_thread_ident()

cdef extern from *:
    """
    /* Whether a thread's number is its own. Python 3.11 makes the state of a new thread under the number of the thread
       that starts it, and changes that once the new one runs; an exception for either could hit the other. */
    static int awa_has_own_number(unsigned long thread) {
    #if PY_VERSION_HEX < 0x030C0000
        int found = 0;
        PyThreadState *state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
        for (; state != NULL; state = PyThreadState_Next(state))
            found += state->thread_id == thread;
        return found == 1;
    #else
        return 1;
    #endif
    }
    """
    bint awa_has_own_number(unsigned long thread)

cdef object _dumps = orjson.dumps
cdef object _sleep = time.sleep
cdef object _fragment = orjson.Fragment
cdef object _blake3 = blake3.blake3
cdef object _sorted = orjson.OPT_SORT_KEYS


# --- values: what may be stored as JSON ------------------------------------------------------------------------------

# What a walk lets pass beyond the rules for stored values.
cdef enum:
    TUPLES = 1
    NON_FINITE = 2
    WIDE_INTS = 4
    NULS = 8

cdef int STORED_DEPTH = 64
# orjson refuses more than 254 levels.
cdef int CANONICAL_DEPTH = 250


@final
cdef class _Flaw:
    """Why a value is refused; the walk adds one step of the path per level on its way out."""

    cdef str reason
    cdef object value
    cdef object limit
    cdef bint is_deep
    cdef list steps

    def __cinit__(self, str reason, object value, object limit=None, bint is_deep=False):
        self.reason = reason
        self.value = value
        self.limit = limit
        self.is_deep = is_deep
        self.steps = []


cdef str _shown(object value):
    # Only of types whose repr is ours to trust: the value comes from anywhere.
    if type(value) is str or type(value) is int or type(value) is float or type(value) is bool or value is None:
        text = repr(value) if type(value) is not int or -10**40 < value < 10**40 else "an int of many digits"
        return text if len(text) <= 60 else text[:57] + "..."
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


cdef object _refusal(_Flaw flaw, str path):
    full = path + "".join(reversed(flaw.steps))
    shown = full if len(full) <= 200 else full[:120] + "..." + full[-77:]
    limit = len(flaw.steps) if flaw.is_deep else flaw.limit
    return ValidationError(f"{shown} {flaw.reason}", path=full, value=flaw.value, limit=limit)


cdef _Flaw _text_flaw(str text, int allowed):
    cdef Py_UCS4 letter
    if PyUnicode_KIND(text) == 1:
        if not allowed & NULS and memchr(PyUnicode_DATA(text), 0, <size_t>PyUnicode_GET_LENGTH(text)) != NULL:
            return _Flaw("contains NUL (\\x00), which PostgreSQL cannot store: remove it, or send bytes as base64", text)
        return None
    for letter in text:
        if letter == 0 and not allowed & NULS:
            return _Flaw("contains NUL (\\x00), which PostgreSQL cannot store: remove it, or send bytes as base64", text)
        if 0xD800 <= letter <= 0xDFFF:
            return _Flaw(
                f"contains the lone surrogate \\u{<int>letter:04x}, which is no text: decode the input with errors="
                "'replace' first", text)
    return None


cdef _Flaw _int_flaw(object value, int allowed, bint *rewrite):
    cdef int overflow = 0
    PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow == 0:
        return None
    if allowed & WIDE_INTS:
        rewrite[0] = True
        try:
            float(value)
        except OverflowError:
            return _Flaw("is an int beyond the range of a double: send it as a str", value)
        return None
    return _Flaw(f"is {_shown(value)}, outside -2**63 to 2**63-1: send it as a str", value, 2**63 - 1)


cdef _Flaw _walk(object value, int room, int allowed, bint *rewrite):
    """The first flaw in *value* or None; *room* is how many levels of containers may still open.

    ``rewrite[0]`` is set when orjson would write a number otherwise than the canonical rules. Recursion is as deep as
    *room* at most, so neither deep nor circular input reaches the end of the C stack.
    """
    cdef _Flaw flaw
    cdef Py_ssize_t position = 0
    cdef PyObject *key
    cdef PyObject *item
    cdef double size
    kind = type(value)
    if kind is str:
        return _text_flaw(<str>value, allowed)
    if value is None or value is True or value is False:
        return None
    if kind is int:
        return _int_flaw(value, allowed, rewrite)
    if kind is float:
        size = fabs(<double>value)
        if not isfinite(size):
            if allowed & NON_FINITE:
                return None
            return _Flaw(f"is {value!r}, which JSON cannot hold: send None or a str", value)
        if size >= 1e16 or (size < 1e-5 and size != 0.0):
            if rewrite != NULL:
                rewrite[0] = True
        return None
    if kind is dict:
        if room == 0:
            return _Flaw("is nested too deeply, or contains itself: flatten it", value, is_deep=True)
        while PyDict_Next(value, &position, &key, &item):
            if type(<object>key) is not str:
                flaw = _Flaw(f"has a key that is not a str but {_shown(<object>key)}: JSON keys are text, convert it "
                             "yourself so that no two keys become one", <object>key)
            else:
                flaw = _text_flaw(<str><object>key, allowed)
                if flaw is not None:
                    flaw.reason = "is a key that " + flaw.reason
                else:
                    flaw = _walk(<object>item, room - 1, allowed, rewrite)
            if flaw is not None:
                flaw.steps.append(path_step(<object>key))
                return flaw
        return None
    if kind is list:
        if room == 0:
            return _Flaw("is nested too deeply, or contains itself: flatten it", value, is_deep=True)
        for position in range(len(<list>value)):
            flaw = _walk((<list>value)[position], room - 1, allowed, rewrite)
            if flaw is not None:
                flaw.steps.append(f"[{position}]")
                return flaw
        return None
    if kind is tuple and allowed & TUPLES:
        return _walk(list(<tuple>value), room, allowed, rewrite)
    return _Flaw(
        f"is {_shown(value)}, which JSON cannot hold exactly: send str, int, float, bool, None, list or dict, or declare "
        "the type on a dataclass field", value)


def path_step(object key) -> str:
    """How *key* continues a path: ``.price``, or ``['unit price']`` when it is no identifier."""
    if type(key) is str:
        return "." + key if (<str>key).isidentifier() else f"[{key!r}]"
    return f"[{_shown(key)}]"


def check_json(object value, str path not None, int max_depth = STORED_DEPTH) -> None:
    """Raise ValidationError when *value* cannot be stored as JSON and come back the same.

    Accepted are exactly str, int, float, bool, None, list and dict with str keys, not their subclasses: an IntEnum or
    an OrderedDict would come back as something else. Refused besides: NUL and lone surrogates in text and keys, NaN
    and infinities, ints outside -2**63 to 2**63-1, and more than *max_depth* levels of list and dict.

    Args:
        value: What is about to be stored; it is only read.
        path: The name of the whole in the error's path, such as ``args``.
        max_depth: Most levels of containers, the outermost included.
    """
    cdef _Flaw flaw = _walk(value, max_depth, 0, NULL)
    if flaw is not None:
        raise _refusal(flaw, path)


def dump_json(object value, str path not None, Py_ssize_t max_bytes) -> bytes:
    """JSON text of *value*, in UTF-8, after :func:`check_json`.

    Raises:
        ValidationError: The value cannot be stored, or its text is longer than *max_bytes*
            (then ``.value`` is its size and ``.limit`` is *max_bytes*).
    """
    cdef bytes text
    cdef _Flaw flaw = _walk(value, STORED_DEPTH, 0, NULL)
    if flaw is not None:
        raise _refusal(flaw, path)
    text = _dumps(value)
    if len(text) > max_bytes:
        raise ValidationError(
            f"{path} takes {len(text):,} bytes as JSON, the limit is {max_bytes:,}: store the data elsewhere and send a "
            "reference, or raise max_args_bytes", path=path, value=len(text), limit=max_bytes)
    return text


# --- canonical: one text per value, for keys and hashes --------------------------------------------------------------


def float_text(double value) -> str:
    """The canonical text of a float: its shortest digits that read back the same.

    With E the decimal exponent of the first digit: positional with a point for -5 <= E <= 15, else ``d.ddde+N`` or
    ``de-N``. NaN and the infinities are ``null``.
    """
    cdef str text
    if not isfinite(value):
        return "null"
    text = repr(value)
    mantissa, letter, exponent = text.partition("e")
    if not letter:
        return text
    power = int(exponent)
    if power == -5:
        sign = "-" if value < 0 else ""
        return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
    return f"{mantissa}e{power:+d}"


cdef object _rewritten(object value):
    """*value* with the numbers that orjson writes differently, or differently in its next release, as text."""
    kind = type(value)
    if kind is dict:
        return {key: _rewritten(item) for key, item in (<dict>value).items()}
    if kind is list or kind is tuple:
        return [_rewritten(item) for item in value]
    if kind is float and value == value:
        return _fragment(float_text(value))
    if kind is int and not -2**63 <= value < 2**63:
        return _fragment(float_text(float(value)))
    return value


cdef bytes _canonical(object value, str path, int allowed):
    cdef bint rewrite = False
    cdef _Flaw flaw = _walk(value, CANONICAL_DEPTH, allowed, &rewrite)
    if flaw is not None:
        raise _refusal(flaw, path)
    return _dumps(_rewritten(value) if rewrite else value, None, _sorted)


def canonical_json(object value) -> bytes:
    """The one JSON text of *value*, in UTF-8: equal values have equal text, whoever writes it.

    Compact, keys sorted by code point at every depth, non-ASCII raw. Ints outside -2**63 to 2**63-1 become doubles,
    NaN and infinities ``null``, tuples arrays.

    Raises:
        ValidationError: A value of another type, a key that is not a str, a lone surrogate, or over 250 levels.
    """
    return _canonical(value, "value", TUPLES | NON_FINITE | WIDE_INTS | NULS)


cdef bytes _utf8(object text, str path):
    if type(text) is not str:
        raise ValidationError(f"{path} must be a str, got {_shown(text)}", path=path, value=text)
    try:
        return (<str>text).encode()
    except UnicodeEncodeError:
        raise ValidationError(f"{path} {text!a} contains a lone surrogate", path=path, value=text) from None


def unique_key(
    str kind not None, object args, *, object queue=None, object by_args=True, bint by_queue=False, object bucket=None
) -> bytes:
    """The 16 bytes that jobs share when they are equal.

    The start of the BLAKE3 of the kind; then, each after a zero byte, the queue, the canonical JSON of the args, and
    the bucket number as a signed 64-bit little-endian integer, whichever were asked for.

    Args:
        kind: The job's kind.
        args: The args as a JSON value.
        queue: Where the job waits; needed with *by_queue*.
        by_args: True for all args, False for none, or the top-level names to look at: then the object of those that
            are present counts, and a missing name differs from null.
        by_queue: Whether equal jobs in different queues differ.
        bucket: Number of the period, None when uniqueness has no period.
    """
    cdef list parts = [_utf8(kind, "kind")]
    if by_queue:
        if queue is None:
            raise ConfigError("by_queue needs the queue's name: pass queue=")
        parts.append(_utf8(queue, "queue"))
    if by_args is not False:
        if by_args is not True:
            args = _chosen(args, by_args)
        parts.append(_canonical(args, "args", TUPLES | WIDE_INTS | NULS))
    if bucket is not None:
        if type(bucket) is not int or not -2**63 <= bucket < 2**63:
            raise ValidationError(
                f"bucket must be a 64-bit int, got {_shown(bucket)}", path="bucket", value=bucket, limit=2**63 - 1)
        parts.append(bucket.to_bytes(8, "little", signed=True))
    return _blake3(b"\0".join(parts)).digest(16)


cdef dict _chosen(object args, object names):
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(type(name) is str for name in names):
        raise ConfigError(f"by_args must be True, False or a list of field names, got {_shown(names)}")
    if type(args) is not dict:
        raise ValidationError(
            f"args must be a dict when by_args names its fields, got {_shown(args)}", path="args", value=args)
    return {name: (<dict>args)[name] for name in names if name in <dict>args}


# --- names: the kind of a class or a function ------------------------------------------------------------------------


def derive_kind(object class_or_name) -> str:
    """The kind that a class, a function or its name stands for: ``SendEmail`` is ``send_email``.

    An underscore goes before an upper-case letter that is not first and either follows a lower-case letter or an ASCII
    digit, or follows an upper-case letter and precedes a lower-case one. Then each letter is lowered by itself.
    """
    name = class_or_name if isinstance(class_or_name, str) else getattr(class_or_name, "__name__", None)
    if type(name) is not str:
        raise ConfigError(f"a kind is derived from a class, a function or a name, not from {_shown(class_or_name)}")
    cdef list out = []
    cdef Py_ssize_t position, length = len(name)
    cdef str letter, before
    for position in range(length):
        letter = name[position]
        if position and letter.isupper():
            before = name[position - 1]
            if (
                before.islower()
                or "0" <= before <= "9"
                or (before.isupper() and position + 1 < length and name[position + 1].islower())
            ):
                out.append("_")
        # Some capitals lower to a letter and a combining mark; the first code point is the letter.
        out.append(letter.lower()[:1])
    return "".join(out)


# --- attempts: claimed batches, their members, and what became of them ------------------------------------------------
#
# All of it is guarded by the GIL: no method lets go of it between a look and the change that follows, except where a
# handler or another Python callable runs.

cdef enum:
    ARRAY_HEADER_BYTES = 20
    INT2_OID = 21
    INT4_OID = 23
    INT8_OID = 20
    TEXT_OID = 25
    FLOAT8_OID = 701

cdef object _EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)


cdef double _now() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec + at.tv_nsec * 1e-9


cdef inline int64_t _int8(const unsigned char *at) noexcept nogil:
    cdef uint64_t value = 0
    cdef int step
    for step in range(8):
        value = value << 8 | at[step]
    return <int64_t> value


cdef inline int32_t _int4(const unsigned char *at) noexcept nogil:
    return <int32_t> (<uint32_t> at[0] << 24 | <uint32_t> at[1] << 16 | <uint32_t> at[2] << 8 | at[3])


cdef inline int16_t _int2(const unsigned char *at) noexcept nogil:
    return <int16_t> (<uint16_t> at[0] << 8 | at[1])


cdef inline const unsigned char *_element(bytes array, Py_ssize_t position, int width):
    """Where element *position* of a binary array of fixed width without NULLs stands."""
    cdef Py_ssize_t at = ARRAY_HEADER_BYTES + position * (4 + width) + 4
    if at + width > PyBytes_GET_SIZE(array):
        raise ValueError("a claimed array is shorter than its batch")
    return <const unsigned char *> PyBytes_AS_STRING(array) + at


@final
cdef class Handler:
    """How to run the jobs of one kind.

    Args:
        kind: Its name.
        function: What to call: with a job when *is_typed*, else with the args by name.
        load: Turns the stored text of the args into the value that the handler gets.
        is_typed: Whether *function* takes a job.
        dump_result: Turns what *function* returns into the JSON text that is kept; None: nothing is kept. Called by
            whoever concludes the attempt.
        options: Whatever else whoever notes the outcome needs to know; not looked at here.
    """

    cdef readonly str kind
    cdef readonly object function
    cdef readonly object load
    cdef readonly bint is_typed
    cdef readonly object dump_result
    cdef readonly object options

    def __cinit__(
        self, str kind not None, function not None, load not None, *, bint is_typed, dump_result=None, options=None
    ):
        self.kind = kind
        self.function = function
        self.load = load
        self.is_typed = is_typed
        self.dump_result = dump_result
        self.options = options


@final
cdef class Batch:
    """One claim row's worth of attempts, as the database sent it."""

    cdef readonly int64_t claim_id
    cdef readonly int64_t runtime
    cdef readonly int slot
    cdef readonly int nonce
    cdef readonly int priority
    cdef readonly str queue
    cdef readonly int size
    cdef readonly int open
    cdef readonly int unfinished
    cdef double spent        # seconds that handlers of its members ran, of those that have ended, ...
    cdef int ran             # ... so many of them
    cdef bytes ids
    cdef bytes entry_ids
    cdef bytes attempts
    cdef bytes max_attempts
    cdef bytes created_at
    cdef bytes args
    cdef list details
    cdef int16_t *done_idx   # members that succeeded, in that order, ...
    cdef int32_t *done_ms
    cdef int done            # ... so many of them, ...
    cdef int taken           # ... of which so many are in a flush

    def __cinit__(self):
        self.done_idx = NULL
        self.done_ms = NULL

    def __dealloc__(self):
        PyMem_Free(self.done_idx)
        PyMem_Free(self.done_ms)

    def __repr__(self):
        return f"<Batch claim={self.claim_id} queue={self.queue!r} size={self.size} open={self.open}>"


@final
cdef class Attempt:
    """One open attempt: a member of a batch, and what has been seen of it since it was claimed."""

    cdef readonly Batch batch
    cdef readonly Handler handler
    cdef readonly int idx
    cdef readonly double started       # monotonic seconds; 0 when it has not
    cdef readonly double expired       # when its handler was told that its time is up; 0 when it was not
    cdef readonly unsigned long thread
    cdef public bint is_cancelled
    cdef public bint is_asked_to_cancel
    cdef readonly bint was_completed
    cdef readonly bint is_over
    cdef readonly bint is_abandoned
    cdef object value
    cdef bytes body
    cdef Py_ssize_t begin
    cdef Py_ssize_t length

    @property
    def id(self):
        return _int8(_element(self.batch.ids, self.idx - 1, 8))

    @property
    def entry_id(self):
        return _int8(_element(self.batch.ids if self.batch.entry_ids is None else self.batch.entry_ids, self.idx - 1, 8))

    @property
    def attempt(self):
        return 1 if self.batch.attempts is None else _int2(_element(self.batch.attempts, self.idx - 1, 2))

    @property
    def max_attempts(self):
        return 25 if self.batch.max_attempts is None else _int2(_element(self.batch.max_attempts, self.idx - 1, 2))

    @property
    def created_at(self):
        return _EPOCH + datetime.timedelta(microseconds=_int8(_element(self.batch.created_at, self.idx - 1, 8)))

    @property
    def details(self):
        """The rarely used options as a dict: tags, metadata, timeout_ms. Empty when none is set."""
        if self.batch.details is None or self.batch.details[self.idx - 1] is None:
            return {}
        return orjson.loads(self.batch.details[self.idx - 1])

    @property
    def has_args(self):
        """Whether the text of the args has arrived; a long one is fetched after the claim."""
        return self.length >= 0

    def put_args(self, bytes body not None):
        """Give the text of the args that the claim left out."""
        self.body = body
        self.begin = 0
        self.length = PyBytes_GET_SIZE(body)

    def args_text(self):
        """The stored text of the args.

        Raises:
            ValueError: It has not arrived.
        """
        if self.length < 0:
            raise ValueError("the args have not been fetched")
        return PyBytes_AS_STRING(self.body)[self.begin:self.begin + self.length]

    def begin_complete(self):
        """Note that the handler completes the attempt in a transaction of its own; False when the attempt is over.

        The GIL is held from the look to the note: whoever ends the attempt later sees that it is doubtful, and who has
        ended it before is not followed by a completion.
        """
        if self.is_over:
            return False
        self.was_completed = True
        return True

    def expire(self, exception not None):
        """Raise *exception* in the thread that runs this attempt's handler, as soon as Python runs there.

        False when the attempt is over, or its thread cannot be told from one that it is just starting. The GIL is held
        from the look to the order, and :meth:`Crew.work` takes the order back when the handler ends, so it cannot hit
        what the thread does next.
        """
        cdef int tries
        for tries in range(20):
            if self.is_over or self.thread == 0:
                return False
            if awa_has_own_number(self.thread):
                self.expired = _now()
                self.is_cancelled = True
                PyThreadState_SetAsyncExc(self.thread, <PyObject *> exception)
                return True
            _sleep(0.001)  # it is just starting a thread
        return False

    def __repr__(self):
        return f"<Attempt job={self.id} idx={self.idx} of {self.batch!r}>"


cdef list _texts(bytes array):
    """The elements of a binary text array: bytes, None for NULL."""
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(array)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(array), at = ARRAY_HEADER_BYTES
    cdef int32_t length
    found = []
    while at + 4 <= size:
        length = _int4(data + at)
        at += 4
        if length < 0:
            found.append(None)
            continue
        if at + length > size:
            raise ValueError("a claimed text array is cut short")
        found.append((<const char *> data)[at:at + length])
        at += length
    return found


def decode_batch(list row not None, int64_t runtime, str queue not None, dict handlers not None):
    """The attempts of one row of ``awa.claim_v1``, in the order in which they are to start.

    Args:
        row: The row's columns in binary form, None for NULL.
        runtime: Whose claim it is.
        queue: Whose entries they are.
        handlers: Kind as UTF-8 -> Handler; the claim named these kinds, so every one is found.

    Raises:
        ValueError: The row does not fit together.
    """
    cdef Batch batch = Batch()
    cdef Attempt attempt
    cdef bytes lens = row[10]
    cdef const unsigned char *data
    cdef Py_ssize_t size, at = ARRAY_HEADER_BYTES, begin = 0
    cdef int32_t length
    cdef int idx
    batch.claim_id = _int8(<const unsigned char *> PyBytes_AS_STRING(<bytes> row[1]))
    batch.slot = _int2(<const unsigned char *> PyBytes_AS_STRING(<bytes> row[2]))
    batch.nonce = _int4(<const unsigned char *> PyBytes_AS_STRING(<bytes> row[3]))
    batch.priority = _int2(<const unsigned char *> PyBytes_AS_STRING(<bytes> row[4]))
    batch.ids, batch.entry_ids, batch.attempts, batch.max_attempts = row[5], row[6], row[7], row[8]
    batch.created_at = row[12]
    batch.details = None if row[13] is None else _texts(row[13])
    batch.args = b"" if row[11] is None else row[11]
    batch.runtime = runtime
    batch.queue = queue
    batch.size = batch.open = batch.unfinished = _int4(<const unsigned char *> PyBytes_AS_STRING(batch.ids) + 12)
    batch.done_idx = <int16_t *> PyMem_Malloc(batch.size * sizeof(int16_t))
    batch.done_ms = <int32_t *> PyMem_Malloc(batch.size * sizeof(int32_t))
    if batch.done_idx == NULL or batch.done_ms == NULL:
        raise MemoryError()
    kinds = _texts(row[9])
    if len(kinds) != batch.size:
        raise ValueError("a claimed batch has fewer kinds than members")
    data = <const unsigned char *> PyBytes_AS_STRING(lens)
    size = PyBytes_GET_SIZE(lens)
    attempts = []
    for idx in range(1, batch.size + 1):
        attempt = Attempt.__new__(Attempt)
        attempt.batch = batch
        attempt.handler = <Handler> handlers[kinds[idx - 1]]
        attempt.idx = idx
        if at + 4 > size:
            raise ValueError("a claimed batch has fewer lengths than members")
        if _int4(data + at) < 0:
            at += 4
            attempt.length = -1
        else:
            length = _int4(data + at + 4)
            at += 8
            attempt.body = batch.args
            attempt.begin = begin
            attempt.length = length
            begin += length
            if begin > PyBytes_GET_SIZE(batch.args):
                raise ValueError("the bodies of a claimed batch are cut short")
        attempts.append(attempt)
    return attempts


cdef bytes _fixed_array(int oid, int width, Py_ssize_t count, bytes elements):
    """A binary array of elements that are written with their lengths already."""
    cdef bytearray head = bytearray()
    if count == 0:
        return b"\0\0\0\0" b"\0\0\0\0" + oid.to_bytes(4, "big")
    head += b"\0\0\0\1" b"\0\0\0\0"
    head += oid.to_bytes(4, "big")
    head += count.to_bytes(4, "big")
    head += b"\0\0\0\1"
    return bytes(head) + elements


cdef inline void _write4(unsigned char *at, int32_t value) noexcept nogil:
    at[0] = <unsigned char> (value >> 24)
    at[1] = <unsigned char> (value >> 16)
    at[2] = <unsigned char> (value >> 8)
    at[3] = <unsigned char> value


cdef bytes _integers(int oid, list values):
    """A binary array of int2, int4 or int8."""
    cdef int width = 2 if oid == INT2_OID else 4 if oid == INT4_OID else 8
    cdef Py_ssize_t count = len(values)
    cdef bytes elements = PyBytes_FromStringAndSize(NULL, count * (4 + width))
    cdef unsigned char *at = <unsigned char *> PyBytes_AS_STRING(elements)
    cdef int64_t value
    cdef int step
    for item in values:
        value = item
        _write4(at, width)
        at += 4
        for step in range(width):
            at[step] = <unsigned char> (value >> (8 * (width - 1 - step)))
        at += width
    return _fixed_array(oid, width, count, elements)


cdef bytes _optional(int oid, list values):
    """A binary array of text or float8 in which None is NULL."""
    if not values:
        return _fixed_array(oid, 0, 0, b"")
    parts = [b"\0\0\0\1", b"\0\0\0\1", oid.to_bytes(4, "big"), len(values).to_bytes(4, "big"), b"\0\0\0\1"]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
            continue
        data = struct.pack(">d", value) if oid == FLOAT8_OID else value if isinstance(value, bytes) else value.encode()
        parts.append(len(data).to_bytes(4, "big"))
        parts.append(data)
    return b"".join(parts)


def int2_array(list values not None):
    """A smallint[] in PostgreSQL's binary form."""
    return _integers(INT2_OID, values)


def text_array(list values not None):
    """A text[] in PostgreSQL's binary form, from str, UTF-8 bytes, and None for NULL."""
    return _optional(TEXT_OID, values)


cdef tuple _done_of(Batch batch):
    """The members of *batch* that succeeded since the last call, and how long each took."""
    # taken moves before anything is allocated: allocating may run finalizers, and they let other threads in
    cdef int first = batch.taken, behind = batch.done, position
    batch.taken = behind
    done = [batch.done_idx[position] for position in range(first, behind)]
    times = [batch.done_ms[position] for position in range(first, behind)]
    return batch, done, times


@final
cdef class Flush:
    """Outcomes that travel in one call of ``awa.settle_v1``."""

    cdef readonly int64_t number
    cdef readonly int64_t runtime
    cdef readonly int count
    cdef readonly bint is_doubtful
    cdef readonly tuple arrays
    cdef list members
    cdef list singles

    @property
    def queues(self):
        """The queues of its attempts."""
        found = {(<Batch> member[0]).queue for member in self.members}
        found.update([(<Attempt> item[0]).batch.queue for item in self.singles])
        return found

    def __repr__(self):
        return f"<Flush {self.number} of {self.count}>"


@final
cdef class Outcomes:
    """Gathers what became of attempts, and keeps the list of claims that have open members."""

    cdef readonly int count
    cdef readonly double oldest
    cdef readonly int64_t newest_claim
    cdef int64_t flushes
    cdef list dirty
    cdef list others
    cdef list doubtful
    cdef dict open_batches
    cdef dict spent          # queue -> [seconds, attempts] of closed batches
    cdef set received

    def __cinit__(self):
        self.spent = {}
        self.open_batches = {}
        self.clear()

    def clear(self):
        """Forget everything: the runtime is gone, its attempts are not ours any more."""
        self.count = 0
        self.oldest = 0.0
        self.newest_claim = 0
        self.dirty = []
        self.others = []
        self.doubtful = []
        for batch in self.open_batches.values():
            self._note_spent(<Batch> batch)
        self.open_batches = {}
        self.received = set()

    def opened(self, list attempts not None):
        """Note the attempts of one batch, which was received just now."""
        cdef Batch batch = (<Attempt> attempts[0]).batch
        self.open_batches[batch.claim_id] = batch
        self.received.add(batch.claim_id)
        if batch.claim_id > self.newest_claim:
            self.newest_claim = batch.claim_id

    def open_claims(self):
        """The claims of which a member is open, or its end not acknowledged."""
        return sorted(self.open_batches)

    def received_since(self, int64_t claim_id):
        """The claims above *claim_id* that were received, closed ones too; those up to it are forgotten."""
        found = list(self.received)  # a copy: what follows may let other threads in
        kept = [known for known in found if known > claim_id]
        if len(kept) < len(found):
            self.received.difference_update([known for known in found if known <= claim_id])
        return kept

    def unfinished(self, str queue not None):
        """How many attempts of *queue* were claimed whose handlers have not ended."""
        cdef int found = 0
        for batch in self.open_batches.values():
            if (<Batch> batch).queue == queue:
                found += (<Batch> batch).unfinished
        return found

    def time_spent(self, str queue not None):
        """Seconds that handlers of *queue* have run, and how many attempts that was; of those that have ended."""
        cdef double seconds = 0.0
        cdef int64_t count = 0
        closed = self.spent.get(queue)
        if closed is not None:
            seconds, count = closed
        for batch in self.open_batches.values():
            if (<Batch> batch).queue == queue:
                seconds += (<Batch> batch).spent
                count += (<Batch> batch).ran
        return seconds, count

    cdef _note_spent(self, Batch batch):
        cdef double seconds = 0.0
        cdef int64_t count = 0
        closed = self.spent.get(batch.queue)
        if closed is not None:
            seconds, count = closed
        self.spent[batch.queue] = (seconds + batch.spent, count + batch.ran)

    cdef inline void _noted(self, double at):
        if self.count == 0:
            self.oldest = at
        self.count += 1

    cdef inline void succeeded(self, Attempt attempt, int32_t elapsed_ms, double at):
        cdef Batch batch = attempt.batch
        if batch.done == batch.size:
            return
        if batch.done == batch.taken:
            self.dirty.append(batch)
        batch.done_idx[batch.done] = <int16_t> attempt.idx
        batch.done_ms[batch.done] = elapsed_ms
        batch.done += 1
        self._noted(at)

    def add(self, Attempt attempt not None, str outcome not None, *, double delay=0.0, int elapsed_ms=0, error=None):
        """Note any outcome but a plain success.

        An attempt that was completed in a transaction of the handler's own is *doubtful*: recording its outcome is the
        question whether that transaction committed, and may have to wait for it. It travels in a flush by itself.

        Args:
            outcome: retried, snoozed, cancelled, failed, released or completed.
            delay: Seconds until the next attempt, for retried and snoozed.
            error: JSON text with type, text and traceback; of completed, the result as JSON text.
        """
        attempt.is_over = True
        if attempt.started == 0.0:  # it never ran
            attempt.batch.unfinished -= 1
        (self.doubtful if attempt.was_completed else self.others).append((attempt, outcome, delay, elapsed_ms, error))
        self._noted(_now())

    def take(self, int64_t runtime):
        """Everything noted so far, as flushes to send in this order.

        Outcomes of attempts that another runtime of this process claimed are dropped: they were rescued.
        """
        dirty, others, doubtful = self.dirty, self.others, self.doubtful
        self.dirty, self.others, self.doubtful = [], [], []
        self.count = 0
        self.oldest = 0.0
        flushes = [self._flush(runtime, [_done_of(<Batch> batch) for batch in dirty], others)]
        flushes += [self._flush(runtime, [], [item]) for item in doubtful]
        return [flush for flush in flushes if flush is not None]

    cdef Flush _flush(self, int64_t runtime, list successes, list others):
        cdef Batch batch
        cdef Flush flush
        claims, slots, nonces, lows, highs, idx, elapsed, members = [], [], [], [], [], [], [], []
        for batch, done, times in successes:
            if done and batch.runtime == runtime:
                claims.append(batch.claim_id)
                slots.append(batch.slot)
                nonces.append(batch.nonce)
                lows.append(len(idx) + 1)
                idx += done
                elapsed += times
                highs.append(len(idx))
                members.append((batch, done, times))
        singles = [item for item in others if (<Attempt> item[0]).batch.runtime == runtime]
        if not claims and not singles:
            return None
        flush = Flush.__new__(Flush)
        self.flushes += 1
        flush.number = self.flushes
        flush.runtime = runtime
        flush.count = len(idx) + len(singles)
        flush.is_doubtful = len(singles) == 1 and (<Attempt> singles[0][0]).was_completed
        flush.members = members
        flush.singles = singles
        flush.arrays = (
            _integers(INT8_OID, claims), _integers(INT2_OID, slots), _integers(INT4_OID, nonces),
            _integers(INT4_OID, lows), _integers(INT4_OID, highs), _integers(INT2_OID, idx),
            _integers(INT4_OID, elapsed),
            _integers(INT8_OID, [(<Attempt> item[0]).batch.claim_id for item in singles]),
            _integers(INT2_OID, [(<Attempt> item[0]).batch.slot for item in singles]),
            _integers(INT4_OID, [(<Attempt> item[0]).batch.nonce for item in singles]),
            _integers(INT2_OID, [(<Attempt> item[0]).idx for item in singles]),
            _optional(TEXT_OID, [item[1] for item in singles]),
            _optional(FLOAT8_OID, [item[2] for item in singles]),
            _integers(INT4_OID, [item[3] for item in singles]),
            _optional(TEXT_OID, [item[4] for item in singles]),
        )
        return flush

    def split(self, Flush flush not None):
        """The outcomes of *flush*, which the database refuses, as one flush each: one bad outcome holds up no other."""
        found = []
        for batch, done, times in flush.members:
            for idx, ms in zip(done, times):
                found.append(self._flush(flush.runtime, [(batch, [idx], [ms])], []))
        found += [self._flush(flush.runtime, [], [item]) for item in flush.singles]
        return found

    def acknowledged(self, Flush flush not None):
        """The database has recorded *flush*; claims without open members are closed."""
        cdef Batch batch
        for batch, done, _ in flush.members:
            self._close(batch, len(done))
        for item in flush.singles:
            self._close((<Attempt> item[0]).batch, 1)

    cdef _close(self, Batch batch, int count):
        batch.open -= count
        if batch.open <= 0 and self.open_batches.pop(batch.claim_id, None) is not None:
            self._note_spent(batch)


# --- the loop that calls handlers -------------------------------------------------------------------------------------

cdef object _current = threading.local()


def current_job():
    """What ``Crew.job`` makes of the attempt that this thread runs; None when it runs none."""
    cdef Attempt attempt = getattr(_current, "attempt", None)
    if attempt is None:
        return None
    return (<Crew> _current.crew).job(attempt, attempt.value)


@final
cdef class Crew:
    """The worker threads of one process, around one inbox of attempts and one LEAD token.

    Whoever takes the token leads: claims and puts the token back. Leadership can be taken out of turn too, when
    outcomes have waited long enough; the token that lies in the inbox is void then. A thread in a handler never leads,
    so one that never comes back is replaced: :meth:`abandon` its attempt, and have another thread :meth:`take_over`.

    Args:
        size: How many threads will call :meth:`work`.
        outcomes: Where successes are noted.
        job: ``job(attempt, args)`` makes what a typed handler gets.
        conclude: ``conclude(attempt, result, error, elapsed_ms)`` notes everything but a plain success, which is one
            whose result nobody keeps. When it raises, the job is retried after a minute.
        late: ``late(attempt, result, error, elapsed_ms)`` is told how the handler of an abandoned attempt ended.
        lead: ``lead()`` claims, and calls :meth:`refill` or :meth:`rest`.
        chosen: The class of results that are outcomes by themselves.
        flush_after: Seconds that an outcome may wait before a thread that has just ended another leads out of turn.
    """

    cdef readonly list running
    cdef readonly list abandoned
    cdef readonly Outcomes outcomes
    cdef readonly bint is_leading
    cdef readonly int unstarted
    cdef public bint is_asleep
    cdef public object poke
    cdef double flush_after
    cdef readonly double mean_seconds
    cdef readonly int64_t finished
    cdef object inbox
    cdef object job
    cdef object conclude
    cdef object late
    cdef object lead
    cdef object chosen
    cdef int64_t token

    def __cinit__(self, int size, Outcomes outcomes not None, *, job, conclude, late, lead, chosen, double flush_after):
        self.running = [None] * size
        self.abandoned = []
        self.outcomes = outcomes
        self.inbox = queue.SimpleQueue()
        self.job = job
        self.conclude = conclude
        self.late = late
        self.lead = lead
        self.chosen = chosen
        self.mean_seconds = -1.0
        self.flush_after = flush_after

    def busy(self):
        """How many threads run a handler."""
        cdef int found = 0
        for attempt in self.running:
            if attempt is not None:
                found += 1
        return found

    def start(self):
        """Put the token into the inbox."""
        self.token += 1
        self.inbox.put(self.token)

    def refill(self, list attempts not None, int token_after):
        """Hand out attempts and give leadership back: the token goes behind *token_after* of them."""
        cdef int position = 0
        put = self.inbox.put
        self.is_leading = False
        self.token += 1
        self.unstarted += len(attempts)
        for attempt in attempts:
            if position == token_after:
                put(self.token)
            put(attempt)
            position += 1
        if token_after >= position:
            put(self.token)

    def rest(self):
        """Give leadership back without a token: nobody claims any more."""
        self.is_leading = False
        self.token += 1

    def take_lead(self):
        """Become the leader out of turn; False when somebody leads."""
        if self.is_leading:
            return False
        self.is_leading = True
        self.token += 1
        return True

    def drain(self):
        """Take every attempt out of the inbox that nobody has started."""
        found = []
        while True:
            try:
                item = self.inbox.get_nowait()
            except queue.Empty:
                return found
            if type(item) is Attempt:
                self.unstarted -= 1
                found.append(item)

    def dismiss(self):
        """Tell every thread to leave after the attempt it runs."""
        for _ in self.running:
            self.inbox.put(None)

    def work(self, int index):
        """Run attempts until dismissed, or abandoned; *index* is this thread's place in ``running``."""
        get = self.inbox.get
        _current.crew = self
        while True:
            item = get()
            if type(item) is Attempt:
                self.unstarted -= 1
                if not self.run(<Attempt> item, index):
                    return
                self._after_an_end()
            elif item is None:
                return
            elif item == self.token and not self.is_leading:
                self.is_leading = True
                self.lead()

    def run_here(self, Attempt attempt not None):
        """Run one attempt now, in the calling thread, which may be in a handler already: of another crew, in a test."""
        before = getattr(_current, "crew", None), getattr(_current, "attempt", None)
        _current.crew = self
        try:
            self.run(attempt, 0)
        finally:
            _current.crew, _current.attempt = before

    cdef _after_an_end(self):
        """An outcome was noted: see that it is recorded."""
        cdef double since
        if self.is_asleep:
            self.is_asleep = False
            self.poke()
        elif self.outcomes.count and not self.is_leading:
            since = _now() - self.outcomes.oldest
            if since >= self.flush_after and self.take_lead():
                self.lead()

    def abandon(self, Attempt attempt not None):
        """Count *attempt* as over though its handler has not ended, and its place as free.

        The place in ``running`` that another thread is to :meth:`take_over`; None when the handler has ended. The GIL
        is held throughout, and :meth:`run` looks before it notes an outcome: an attempt has one end. Its thread stays
        in ``abandoned`` until the handler returns, and then leaves.
        """
        cdef int index
        if attempt.is_over:
            return None
        for index in range(len(self.running)):
            if self.running[index] is attempt:
                attempt.is_over = attempt.is_abandoned = True
                attempt.batch.unfinished -= 1
                self.running[index] = None
                self.abandoned.append(attempt)
                self._note_time(attempt.batch, _now() - attempt.started)
                return index
        return None

    def take_over(self, int index, Attempt attempt not None, error not None):
        """Note *error* as what became of an abandoned attempt, then :meth:`work` in the place of its thread."""
        self._conclude(attempt, None, error, _now() - attempt.started)
        self._after_an_end()
        self.work(index)

    cdef void _note_time(self, Batch batch, double seconds):
        batch.spent += seconds
        batch.ran += 1
        if self.mean_seconds < 0:
            self.mean_seconds = seconds
        else:
            self.mean_seconds += (seconds - self.mean_seconds) * 0.05
        self.finished += 1

    cdef bint run(self, Attempt attempt, int index) except -1:
        """Run one attempt; False when it was abandoned meanwhile, and this thread replaced."""
        cdef Handler handler = attempt.handler
        cdef double seconds
        error = None
        result = None
        attempt.started = _now()
        attempt.thread = PyThread_get_thread_ident()
        self.running[index] = attempt
        _current.attempt = attempt
        try:
            args = attempt.value = handler.load(attempt.args_text())
            if handler.is_typed:
                result = handler.function(self.job(attempt, args))
            else:
                result = handler.function(**args)
        except BaseException as raised:
            error = raised
        attempt.is_over = True
        if attempt.expired != 0.0:
            PyThreadState_SetAsyncExc(attempt.thread, NULL)
        _current.attempt = None
        attempt.value = None
        seconds = _now() - attempt.started
        if attempt.is_abandoned:
            self.abandoned.remove(attempt)
            try:
                self.late(attempt, result, error, _milliseconds(seconds))
            except BaseException:
                pass  # only told, and whatever the handler left behind may do anything when it is looked at
            return False
        attempt.batch.unfinished -= 1
        self.running[index] = None
        self._note_time(attempt.batch, seconds)
        if error is None and not attempt.was_completed and not attempt.is_cancelled and handler.dump_result is None \
                and (result is None or not issubclass(type(result), self.chosen)):
            self.outcomes.succeeded(attempt, _milliseconds(seconds), attempt.started + seconds)
        else:
            self._conclude(attempt, result, error, seconds)
        return True

    cdef _conclude(self, Attempt attempt, result, error, double seconds):
        try:
            self.conclude(attempt, result, error, _milliseconds(seconds))
        except BaseException as odd:
            # What a handler leaves behind may do anything when it is looked at; the thread and the job live on.
            self.outcomes.add(
                attempt, "retried", delay=60.0,
                error=b'{"type":"OutcomeUnknown","text":"what its handler left raised %b","traceback":""}'
                % type(odd).__name__.encode("ascii", "replace"),
            )


cdef int32_t _milliseconds(double seconds):
    return <int32_t> min(seconds * 1000.0, 2e9)
