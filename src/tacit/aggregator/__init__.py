"""The aggregator: a node in the path that adds payloads. One wire format, one slot rule, several planes; control, and the host stack."""

from tacit.aggregator.client import Client, Outcome
from tacit.aggregator.control import Control
from tacit.aggregator.kernel_plane import KernelPlane
from tacit.aggregator.membership import Membership, Terms
from tacit.aggregator.spec import Address, Job
from tacit.aggregator.stats import JobStats, RankStats, Rates
from tacit.aggregator.user_plane import UserPlane
from tacit.aggregator.wire import Header, Kind, LaneType

__all__ = [
    "Address",
    "Client",
    "Control",
    "Header",
    "Job",
    "JobStats",
    "KernelPlane",
    "Kind",
    "LaneType",
    "Membership",
    "Outcome",
    "RankStats",
    "Rates",
    "Terms",
    "UserPlane",
]
