"""Schedule x topology -> time: electrical networks, optical rings, workloads. START HERE: `cost`. No torch.

The core is the files of this folder; drawing/ makes pictures of their results, studies/ runs searches and sweeps over them.
"""

from tacit.sim.costs import Cost, StageCost
from tacit.sim.estimate import Estimate, cost
from tacit.sim.fabric import Fabric

__all__ = ["Cost", "Estimate", "Fabric", "StageCost", "cost"]
