"""HOW bytes move: the transfers of a process group, the link to an aggregator, the link to a server that does not train.

Transports know nothing of codecs, requests or schemes: they move bytes and count them.
"""

from tacit.transports.process_group import Wire, ring_nbytes

__all__ = ["Wire", "ring_nbytes"]
