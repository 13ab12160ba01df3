"""The conformance kit: holds any codec, also yours, to what it claims.

    from tacit.testing import check, require
    require(MyCodec())                  # in a test: raises ConformanceError with the first broken rule
    for finding in check(MyCodec()):    # or look at every figure
        print(finding)

On the command line: `tacit codecs check "int8(block=512)"` or `tacit codecs check mypackage.mymodule:MyCodec`.
"""

from tacit.testing.conformance import CHECKS, LAYOUTS, Finding, check, require
from tacit.testing.vectors import FAMILIES, nmse, vectors

__all__ = ["CHECKS", "FAMILIES", "LAYOUTS", "Finding", "check", "nmse", "require", "vectors"]
