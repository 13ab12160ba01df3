"""Just enough of libbpf for the kernel plane: compile a source, load it, reach its maps, hang its programs on interfaces.

Called through ctypes, since that needs no headers when tacit is built: whoever has no libbpf has everything but this plane.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import tacit
from tacit.errors import ConfigError

_SOURCE = "plane.bpf.c"
_ARRAY = 2  # BPF_MAP_TYPE_ARRAY
_LOCKED = 4  # BPF_F_LOCK
_XDP, _TCX_INGRESS = 37, 46  # places to attach a link to
_INGRESS, _REPLACE = 1, 1  # of a clsact qdisc; instead of what a killed process left there
_PRIORITY = 0x7AC1  # of our filters: a number of our own
_libbpf_lines: deque[str] = deque(maxlen=4)  # the last lines of libbpf, for an error's sentence


# ---- the library and the object


@cache
def library() -> ctypes.CDLL:
    """libbpf, with the types of what is called here; ConfigError if it is not there."""
    try:
        found = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as cause:
        raise ConfigError("the kernel plane needs libbpf 1.x (Debian: libbpf1)") from cause
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    types: dict[str, tuple[Any, list[Any]]] = {
        "bpf_object__open_mem": (pointer, [pointer, size, pointer]),
        "bpf_object__load": (ctypes.c_int, [pointer]),
        "bpf_object__close": (None, [pointer]),
        "bpf_object__find_map_by_name": (pointer, [pointer, text]),
        "bpf_object__find_program_by_name": (pointer, [pointer, text]),
        "bpf_map__fd": (ctypes.c_int, [pointer]),
        "bpf_map__set_max_entries": (ctypes.c_int, [pointer, ctypes.c_uint32]),
        "bpf_map__set_value_size": (ctypes.c_int, [pointer, ctypes.c_uint32]),
        "bpf_map__set_initial_value": (ctypes.c_int, [pointer, pointer, size]),
        "bpf_program__fd": (ctypes.c_int, [pointer]),
        "bpf_program__set_autoload": (ctypes.c_int, [pointer, ctypes.c_bool]),
        "libbpf_set_print": (pointer, [pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.libbpf_set_print(_callback)
    return found


def _listen(level: int, form: int, values: int) -> int:
    if level < 2:  # warnings and news, not what it does at each step
        line = ctypes.create_string_buffer(4096)
        ctypes.CDLL(None).vsnprintf(
            line, ctypes.c_size_t(4096), ctypes.c_void_p(form), ctypes.c_void_p(values)
        )
        _libbpf_lines.extend(line.value.decode(errors="replace").strip().splitlines())
    return 0


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_listen)


@cache
def compiled() -> bytes:
    """The object file of the plane's program. Compiled once a process, in about a second: a cache on disk would have to be
    trusted by root."""
    if (clang := shutil.which("clang")) is None:
        raise ConfigError("the kernel plane is compiled where it runs, and needs clang (Debian: clang)")
    source = _source()
    headers = [source.parent, source.parent.parent]  # as installed, and as in the repository
    if machine := sysconfig.get_config_var("MULTIARCH"):
        headers.append(Path("/usr/include") / machine)  # Debian's <asm/types.h>
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "plane.o"
        flags = ["-O2", "-g", "-Wall", "-target", "bpf", "-mcpu=v3", *(f"-I{header}" for header in headers)]
        tried = subprocess.run([clang, *flags, "-c", source, "-o", built], capture_output=True, text=True)
        if tried.returncode:
            reason = next(
                (line for line in tried.stderr.splitlines() if "error:" in line), tried.stderr.strip()
            )
            raise ConfigError(
                f"clang could not compile the kernel plane ({reason}); its headers are Debian's libbpf-dev and linux-libc-dev"
            )
        return built.read_bytes()


def _source() -> Path:
    """Beside the installed package; in a checkout, the one that is edited."""
    places = [Path(path) / "bpf" / _SOURCE for path in tacit.__path__]
    places.insert(0, Path(__file__).parents[4] / "native" / "bpf" / _SOURCE)
    for place in places:
        if place.exists():
            return place
    raise ConfigError(f"{_SOURCE} is missing from this installation of tacit; install it again")


def check_allowed() -> None:
    """ConfigError if this process may not load BPF."""
    with ExitStack() as stack:
        Map.create("tacit_try", 8, stack)


# ---- maps, all with 32-bit keys


class Map:
    """An array in the kernel. `value_nbytes` is that of one entry; of one entry on one CPU, if each has its own."""

    def __init__(self, fd: int, value_nbytes: int, cpus: int = 1) -> None:
        self.fd, self._value_nbytes, self._cpus = fd, value_nbytes, cpus

    @classmethod
    def create(cls, name: str, value_nbytes: int, stack: ExitStack) -> Self:
        """An array of one entry, for as long as `stack` is open."""
        fd = _done(library().bpf_map_create(_ARRAY, name.encode(), 4, value_nbytes, 1, None), "a map")
        stack.callback(os.close, fd)
        return cls(fd, value_nbytes)

    def read(self, index: int) -> bytes:
        value = ctypes.create_string_buffer(self._value_nbytes * self._cpus)
        _done(library().bpf_map_lookup_elem(self.fd, _key(index), value), "reading a map")
        return value.raw

    def write(self, index: int, value: bytes) -> None:
        """What programs see after it is all of it or nothing only if it is a map in a map."""
        assert len(value) == self._value_nbytes * self._cpus
        _done(library().bpf_map_update_elem(self.fd, _key(index), value, ctypes.c_uint64(0)), "writing a map")

    def delete(self, index: int) -> None:
        """Of a map of maps: no program works with the entry when this returns."""
        _done(library().bpf_map_delete_elem(self.fd, _key(index)), "deleting from a map")

    def read_run(self, first: int, count: int) -> bytes:
        """Entries that have a lock, each while it is locked."""
        values = ctypes.create_string_buffer(self._value_nbytes * count)
        keys, found = (ctypes.c_uint32 * count)(), ctypes.c_uint32(count)
        before = _key(first - 1) if first else None
        after, options = _key(0), _batch(_LOCKED)
        call = library().bpf_map_lookup_batch
        _done(call(self.fd, before, after, keys, values, ctypes.byref(found), options), "reading a map")
        return values.raw

    def clear_run(self, first: int, count: int) -> None:
        keys, found = (ctypes.c_uint32 * count)(*range(first, first + count)), ctypes.c_uint32(count)
        values = ctypes.create_string_buffer(self._value_nbytes * count)
        call = library().bpf_map_update_batch
        _done(call(self.fd, keys, values, ctypes.byref(found), _batch(_LOCKED)), "writing a map")


def _key(index: int) -> Any:
    return ctypes.byref(ctypes.c_uint32(index))


def _batch(flags: int) -> Any:
    return (ctypes.c_uint64 * 3)(
        24, flags, 0
    )  # struct bpf_map_batch_opts: its size, flags of elements, flags


def cpus() -> int:
    return _done(library().libbpf_num_possible_cpus(), "counting processors")


# ---- programs


class Loaded:
    """The plane's object in the kernel, until it is closed; links keep its programs alive for themselves."""

    _object: int | None = None

    def __init__(
        self,
        programs: tuple[str, ...],
        settings: bytes,
        entries: Mapping[str, int],
        value_nbytes: Mapping[str, int],
    ) -> None:
        """With these `programs`; `entries` and `value_nbytes` by the map's name, where they are not as in the source."""
        native, image = library(), compiled()
        _libbpf_lines.clear()
        self._object = native.bpf_object__open_mem(image, len(image), None)
        if not self._object:
            raise _refusal("opening the kernel plane's object")
        try:
            for name in ("tacit_tc", "tacit_xdp"):
                _done(native.bpf_program__set_autoload(self._program(name), name in programs), name)
            for name, count in entries.items():
                _done(native.bpf_map__set_max_entries(self._map(name), count), name)
            for name, nbytes in value_nbytes.items():
                _done(native.bpf_map__set_value_size(self._map(name), nbytes), name)
            _done(
                native.bpf_map__set_initial_value(self._map(".rodata"), settings, len(settings)), "settings"
            )
            _done(native.bpf_object__load(self._object), "loading the kernel plane")
        except BaseException:
            self.close()
            raise

    def _map(self, name: str) -> int:
        found: int = library().bpf_object__find_map_by_name(self._object, name.encode())
        assert found, name
        return found

    def _program(self, name: str) -> int:
        found: int = library().bpf_object__find_program_by_name(self._object, name.encode())
        assert found, name
        return found

    def map(self, name: str, value_nbytes: int, cpus: int = 1) -> Map:
        return Map(library().bpf_map__fd(self._map(name)), value_nbytes, cpus)

    def program_fd(self, name: str) -> int:
        fd: int = library().bpf_program__fd(self._program(name))
        return fd

    def close(self) -> None:
        if self._object:
            library().bpf_object__close(self._object)
        self._object = None

    def __del__(self) -> None:
        self.close()


@contextmanager
def attached_xdp(program_fd: int, ifindex: int) -> Iterator[None]:
    """In the driver if it can, else where the kernel takes packets over from it. The kernel detaches it if the process dies."""
    _libbpf_lines.clear()
    link = _done(library().bpf_link_create(program_fd, ifindex, _XDP, None), "attaching to XDP")
    try:
        yield
    finally:
        os.close(link)


@contextmanager
def attached_tc(program_fd: int, ifindex: int, handle: int, *, links: bool = True) -> Iterator[None]:
    """On the way in. From Linux 6.6 on the kernel detaches it if the process dies; before that (or without `links`) a filter
    stays then, until the next one with the same `handle` takes its place."""
    link = library().bpf_link_create(program_fd, ifindex, _TCX_INGRESS, None) if links else -1
    if link >= 0:
        try:
            yield
        finally:
            os.close(link)
        return
    # struct bpf_tc_hook: its size in 64 bits, ...
    hook = (ctypes.c_uint32 * 6)(24, 0, ifindex, _INGRESS, 0, 0)
    native = library()
    native.bpf_tc_hook_create(hook)  # if there is one already, so much the better
    _libbpf_lines.clear()
    # struct bpf_tc_opts
    options = (ctypes.c_uint32 * 8)(32, 0, program_fd, _REPLACE, 0, handle, _PRIORITY, 0)
    _done(native.bpf_tc_attach(hook, options), "attaching to tc")
    try:
        yield
    finally:
        native.bpf_tc_detach(hook, (ctypes.c_uint32 * 8)(32, 0, 0, 0, 0, handle, _PRIORITY, 0))


# ---- errors


def _done(result: int, what: str) -> int:
    if result < 0:
        raise _refusal(what, -result)
    return result


def _refusal(what: str, number: int = 0) -> ConfigError:
    number = number or ctypes.get_errno()
    lines = f" ({'; '.join(_libbpf_lines)[-400:]})" if _libbpf_lines else ""
    way_out = "run as root" if number == errno.EPERM else "the user-space plane does without"
    return ConfigError(f"{what}: the kernel said {os.strerror(number)!r}{lines}; {way_out}")
