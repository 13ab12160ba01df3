"""What the lab refuses, in one sentence each."""

from tacit.errors import TacitError


class LabError(TacitError):
    """This machine, its kernel or this network cannot do what was asked."""


class NoNamespacesError(LabError):
    """Neither root nor user namespaces: no network of one's own can be built here."""


class GateError(LabError):
    """The network that was built is not the one that was asked for: nothing measured on it is reported."""
