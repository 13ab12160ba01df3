// Registers the aggregator's part of tacit._core.
#pragma once

#include <nanobind/nanobind.h>

namespace tacit {
void bind_aggregator(nanobind::module_& m);
}
