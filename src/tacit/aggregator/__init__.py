"""The aggregator: a node in the path that adds payloads. One wire format, one slot rule, several planes."""

from tacit.aggregator.spec import Address, Job
from tacit.aggregator.stats import JobStats, RankStats, Rates
from tacit.aggregator.user_plane import UserPlane
from tacit.aggregator.wire import Header, Kind, LaneType

__all__ = ["Address", "Header", "Job", "JobStats", "Kind", "LaneType", "RankStats", "Rates", "UserPlane"]
