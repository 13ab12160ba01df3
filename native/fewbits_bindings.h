// Registers numbers in few bits, fewbits.h, in tacit._core.
#pragma once

#include <nanobind/nanobind.h>

namespace tacit {
void bind_fewbits(nanobind::module_& m);
}
