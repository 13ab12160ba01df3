"""The aggregator: a node in the path that adds payloads. One wire format, one slot rule, several planes; control, and the host stack."""

from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.aggregator.planes.stats import JobStats, RankStats, Rates
from tacit.aggregator.planes.user_plane import UserPlane
from tacit.aggregator.spec import Address, PlaneJob
from tacit.aggregator.wire import Header, LaneType, PacketKind

__all__ = [
    "Address",
    "Client",
    "ControlServer",
    "Header",
    "JobStats",
    "KernelPlane",
    "LaneType",
    "Membership",
    "PacketKind",
    "PlaneJob",
    "RankStats",
    "Rates",
    "SumOutcome",
    "Terms",
    "UserPlane",
]
