"""Schedule x network -> time: electrical networks, optical rings, workloads. No torch here."""

from tacit.sim.cost import Cost, StageCost

__all__ = ["Cost", "StageCost"]
