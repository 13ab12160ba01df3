"""A probe that can be worked out by hand: operations and codecs whose time is a line."""

from tacit.plan.values import (
    Curve,
    OperationCurve,
    OperationUse,
    Probe,
    ProbedMachine,
    RequestCost,
    StrategyCost,
)

HERE = ProbedMachine("a CPU", 4, 8 << 30, "2.13.0", 1)
NUMELS = (0.0, 1e6)


def straight(first_s, slope_s, sizes=(0.0, 1e6)):
    values = tuple(first_s + slope_s * size for size in sizes)
    return Curve(sizes, values, values, values, (0.0, 0.0))


def cost(
    choice,
    *,
    nbytes_each,
    encode_s=0.0,
    owner_s=0.0,
    decode_s=0.0,
    operation="all_reduce float32",
    lossy=False,
    **more,
):
    """`..._s` are seconds a million elements, `nbytes_each` bytes an element."""
    request = RequestCost(
        "Sum",
        straight(0.0, encode_s * 1e-6),
        straight(0.0, owner_s * 1e-6),
        (OperationUse(operation, (0.0, nbytes_each * 1e6)),),
    )
    sent = (0.0, 1.5 * nbytes_each * 1e6)
    return StrategyCost(choice, NUMELS, (request,), straight(0.0, decode_s * 1e-6), sent, lossy, **more)


def probe(*costs, cores=4.0, second_a_mbyte=0.1, latency_s=0.0, **more):
    """Every operation takes `second_a_mbyte` for a million bytes, after `latency_s`."""
    names = {use.operation for each in costs for request in each.requests for use in request.uses} | {"send"}
    curve = straight(latency_s, second_a_mbyte * 1e-6)
    operations = tuple(OperationCurve(name, curve) for name in sorted(names))
    return Probe(
        4,
        "gloo",
        "cpu",
        cores,
        HERE,
        operations,
        costs,
        latency_s=1e-3,
        at_once_bps=8e7,
        alone_bps=8e7,
        **more,
    )


PLAIN = cost("DDP", nbytes_each=4)
BF16 = cost("DDP bf16", nbytes_each=2, lossy=True)
INT8 = cost("every / int8(block=256) / sharded", nbytes_each=1, encode_s=0.01, decode_s=0.02, lossy=True)
