"""Addresses as people write them: `host:port`, with a way out where they cannot be read."""

from collections.abc import Iterator
from contextlib import contextmanager

from tacit.aggregator.spec import Address
from tacit.errors import ConfigError

PORT = 4800  # of an aggregator: UDP for packets, TCP for control


def parse_address(text: str, *, host: str = "127.0.0.1", port: int | None = None) -> Address:
    """`host:port`; `:port` means `host`, and where `port` is given the port may be left out."""
    own_host, colon, own_port = text.strip().rpartition(":")
    if not colon:
        own_host, own_port = own_port, "" if port is None else str(port)
    if (
        not own_port.isdecimal()
        or not 0 <= int(own_port) <= 65535
        or ":" in own_host
        or (not colon and not own_host)
    ):
        raise ConfigError(
            f"{text!r} is no address; write a host and a port from 0 to 65535, such as 10.0.0.1:{PORT}"
        )
    return own_host or host, int(own_port)


def address_text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


@contextmanager
def opening(address: Address, verb: str = "bound to") -> Iterator[None]:
    """Around a core that opens a socket there: what it is refused is a ConfigError."""
    try:
        yield
    except OSError as cause:
        raise ConfigError(
            f"{address_text(address)} cannot be {verb} ({cause.strerror}); name another address or port"
        ) from cause
    except ValueError as cause:
        raise ConfigError(str(cause)) from cause
