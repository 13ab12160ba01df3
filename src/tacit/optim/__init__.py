"""Optimizers for large batches and for little communication: one file a method, each with its formula. `from tacit import optim`.

OneBitAdam     ranks exchange momenta instead of gradients: 1-bit Adam, and the variance of 0/1 Adam
SignSgd        the step of DeMo and of signSGD
Lars, Lamb     a learning rate for each layer: large batches
linear_scaling, warm_up, trust_groups          what large batches need beside them
"""

from tacit.optim.lamb import Lamb
from tacit.optim.lars import Lars, trust_groups
from tacit.optim.momentum_optimizer import MomentumOptimizer
from tacit.optim.one_bit_adam import OneBitAdam
from tacit.optim.schedules import linear_scaling, warm_up
from tacit.optim.sign_sgd import SignSgd

__all__ = [
    "Lamb",
    "Lars",
    "MomentumOptimizer",
    "OneBitAdam",
    "SignSgd",
    "linear_scaling",
    "trust_groups",
    "warm_up",
]
