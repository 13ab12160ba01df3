"""Optimizers for large batches and for little communication: one file a method, each with its formula. `from tacit import optim`.

SignSgd        the step of DeMo and of signSGD
Lars, Lamb     a learning rate for each layer: large batches
linear_scaling, warm_up, trust_groups          what large batches need beside them
"""

from tacit.optim.lamb import Lamb
from tacit.optim.lars import Lars, trust_groups
from tacit.optim.schedules import linear_scaling, warm_up
from tacit.optim.sign_sgd import SignSgd

__all__ = [
    "Lamb",
    "Lars",
    "SignSgd",
    "linear_scaling",
    "trust_groups",
    "warm_up",
]
