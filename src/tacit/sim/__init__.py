"""Schedule x topology -> time: electrical networks, optical rings, workloads. START HERE: `cost`; `rows_cost` for sparse tables. No torch.

The core is the files of this folder; drawing/ makes pictures of their results, studies/ runs searches and sweeps over them.
"""

from tacit.sim.costs import Cost, StageCost
from tacit.sim.estimate import Estimate, cost
from tacit.sim.fabric import Fabric
from tacit.sim.rows import RowsEstimate, rows_cost

__all__ = ["Cost", "Estimate", "Fabric", "RowsEstimate", "StageCost", "cost", "rows_cost"]
